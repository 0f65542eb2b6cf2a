"""The checkpoints of a run in an object store: the same promises as in a folder."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_examples import Log, loaded_step, save, tensors_of

from armillary.checkpoint import writing
from armillary.checkpoint.config import Checkpoint
from armillary.checkpoint.find import open_checkpoints
from armillary.checkpoint.places.open import open_place
from armillary.checkpoint.retention import shelved_in
from armillary.checkpoint.store import CheckpointStore
from armillary.cli.main import main
from armillary.foundation.errors import RunError, UserError
from object_store import ObjectStore, fail_with, no_trouble


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with ObjectStore() as server:
        yield server


@pytest.fixture
def address(server: ObjectStore) -> str:
    server.trouble = no_trouble
    return server.new_address()


def steps_at(address: str) -> list[int]:
    return sorted(each.step for each in shelved_in(open_place(address)))


def test_what_stays_and_what_is_found_is_as_in_a_folder(address: str) -> None:
    log = Log()
    config = Checkpoint(keep_last=1, keep_every=10, ephemeral_every=1)
    with CheckpointStore(address, config, log) as store:
        store.clean()
        save(store, 9, 10, 11, 12)
        assert steps_at(address) == [10, 12]
        assert loaded_step(store) == 12
        assert loaded_step(store, "10") == 10
        assert loaded_step(store, f"{address}/step-00000010") == 10
        with pytest.raises(UserError, match=r"no checkpoint of step 11(?s:.*)steps 10, 12"):
            store.find("11")
        (aside,) = store.set_aside_after(10)
        assert aside.startswith(f"{address}/set-aside-step-00000012-")
        assert loaded_step(store) == 10
    durable = [f["path"] for _, f in log.events if f.get("state") == "durable"]
    assert durable[-1] == f"{address}/step-00000012"
    with CheckpointStore(f"{address}/other") as other:  # resumes from another run's
        assert loaded_step(other, address) == 10
    place, name = open_checkpoints(f"{address}/step-00000010/")
    assert (place.address, name) == (address, "step-00000010")


def test_a_server_in_trouble_stops_nothing_and_the_save_is_made_once_it_is_well(
    server: ObjectStore, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_LONGEST_PAUSE", 0.1)
    log, failed, durable = Log(), threading.Event(), threading.Event()

    def tell(kind: str, fields: dict[str, Any]) -> None:
        log(kind, fields)
        if event := {"failed": failed, "durable": durable}.get(fields.get("state", "")):
            event.set()

    config = Checkpoint(keep_last=1, retry_seconds=0.3)
    with CheckpointStore(address, config, tell) as store:
        save(store, 10)
        failed.clear()
        durable.clear()
        server.trouble = fail_with(500)
        store.save(20, tensors_of(20), {"tokens_total": 2000})
        store.wait_until_staged()  # training goes on
        assert failed.wait(60)
        server.trouble = no_trouble
        assert durable.wait(60)
        store.wait()
        assert store.durable_step == 20
        assert steps_at(address) == [20]
        assert loaded_step(store) == 20
    assert any("step-00000020 was not written" in text for text in log.warnings())


def test_a_run_whose_place_was_taken_over_publishes_nothing_and_says_by_whom(
    address: str,
) -> None:
    log = Log()
    with CheckpointStore(address, on_event=log) as old, CheckpointStore(address) as new:
        save(old, 10)
        new.clean()  # a newer run begins there
        old.save(20, tensors_of(20), {})
        with pytest.raises(RunError, match="another run writes to s3://"):
            old.wait(raise_failure=True)
        save(new, 11)
        assert steps_at(address) == [10, 11]
    assert log.states()[-1] == ("failed", 20)


def test_the_command_works_on_an_address(
    address: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with CheckpointStore(address, Checkpoint(keep_last=9)) as store:
        save(store, 1, 2, 3)
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.toml").write_text(f'[checkpoint]\nfolder = "{address}"\n')

    def call(*words: str) -> Any:
        capsys.readouterr()
        assert main(["checkpoints", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert [entry["step"] for entry in call("list", str(run))] == [1, 2, 3]
    assert all(entry["verifies"] for entry in call("verify", address))
    assert call("pin", address, "1") == {"pinned": [1]}
    assert len(call("prune", address, "--keep-last", "1")) == 1
    assert steps_at(address) == [1, 3]
    moved = call("diff", f"{address}/step-00000001", address)["tensors"]
    assert {tensor["name"] for tensor in moved} == {"model.weight", "optimizer.weight.step"}
