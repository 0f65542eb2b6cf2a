"""Saving, resuming, keeping: in one process."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_examples import (
    Log,
    files_in,
    flip_bit,
    loaded_step,
    names,
    save,
    tensors_file,
    tensors_of,
)

from armillary.checkpoint.config import Checkpoint
from armillary.checkpoint.places.local import LocalPlace
from armillary.checkpoint.store import CheckpointStore
from armillary.checkpoint.verify import verify
from armillary.foundation.errors import RunError, UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


def test_a_manifest_holds_the_contract_and_files_match_it(folder: Path) -> None:
    log = Log()
    with CheckpointStore(folder, on_event=log) as store:
        save(store, 20)
        assert store.durable_step == 20
    manifest = json.loads((folder / "step-00000020" / "manifest.json").read_text())
    expected = {"format": 2, "step": 20, "tokens_total": 2000, "cursor": {"samples": 20}}
    assert expected.items() <= manifest.items()
    assert manifest["recipe_sha256"] == "ab"
    assert {"created", "provenance", "scores", "kind"} <= manifest.keys()
    assert {"python", "torch", "armillary"} <= manifest["versions"].keys()
    assert manifest["code"].keys() == {"version", "commit"}
    on_disk = set(files_in(folder / "step-00000020")) - {"manifest.json"}
    assert set(manifest["files"]) == on_disk
    assert {"tensors.json", "state.json", "rng-00000.json"} <= on_disk
    assert log.states() == [("staged", 20), ("durable", 20)]
    durable = log.events[-1][1]
    assert durable["path"] == str(folder / "step-00000020")
    assert durable["bytes"] == sum(entry["bytes"] for entry in manifest["files"].values())
    assert durable["seconds"] > 0


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_is_stored_is_the_state_at_the_call(folder: Path, asynchronous: bool) -> None:
    tensors = {"a": torch.arange(10.0), "b": torch.ones(3, dtype=torch.bfloat16)}
    scalars = {"cursor": [1]}
    with CheckpointStore(folder, Checkpoint(asynchronous=asynchronous)) as store:
        store.save(1, tensors, scalars)
        store.wait_until_staged()
        for tensor in tensors.values():
            tensor.zero_()
        scalars["cursor"].append(2)
        found = store.find()
        assert found is not None
        read, rng = store.load(found, tensors)
    assert torch.equal(tensors["a"], torch.arange(10.0))
    assert torch.equal(tensors["b"], torch.ones(3, dtype=torch.bfloat16))
    assert read == {"cursor": [1]}
    assert rng is None


def test_a_save_waits_for_the_one_in_flight_and_never_overlaps_it(folder: Path) -> None:
    running, most = 0, 0

    def count(stage: str) -> None:
        nonlocal running, most
        running += {"open": 1, "publish": -1}.get(stage, 0)
        most = max(most, running)

    with CheckpointStore(folder, on_stage=count) as store:
        save(store, 1, 2, 3)
    assert most == 1


def test_a_log_that_cannot_be_written_does_not_stop_a_save(folder: Path) -> None:
    def refuse(kind: str, fields: dict[str, Any]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with CheckpointStore(folder, on_event=refuse) as store:
        save(store, 10)
        assert loaded_step(store) == 10


def damages(folder: Path) -> Iterator[tuple[str, Any]]:
    """Ways to break a checkpoint, each with a word of the reason that must be given."""
    big = tensors_file(folder)
    manifest = folder / "manifest.json"
    yield "bytes instead of", lambda: big.write_bytes(big.read_bytes()[:-1])
    yield "does not match its checksum", lambda: flip_bit(big, big.stat().st_size // 2)
    yield "does not match its checksum", lambda: flip_bit(folder / "state.json", 5)
    yield "is missing", (folder / "tensors.json").unlink
    yield "no manifest.json", manifest.unlink
    yield "unreadable", lambda: manifest.write_bytes(manifest.read_bytes()[:100])
    yield (
        "its own checksum",
        lambda: manifest.write_text(manifest.read_text().replace("2000", "2001")),
    )
    yield "format 3", lambda: manifest.write_text(manifest.read_text().replace(": 2,", ": 3,", 1))
    yield (
        "in a pickle",
        lambda: manifest.write_text(manifest.read_text().replace(": 2,", ": 1,", 1)),
    )
    yield "not a regular file", lambda: (big.rename(folder / "x"), big.symlink_to(folder / "x"))


def test_whatever_is_damaged_is_skipped_with_its_reason(folder: Path) -> None:
    log = Log()
    with CheckpointStore(folder, on_event=log) as store:
        save(store, 10, 20)
        newest, copy = folder / "step-00000020", folder.parent / "copy"
        shutil.copytree(newest, copy)
        for reason, damage in list(damages(newest)):
            damage()
            found = store.find("auto")
            assert found is not None and found.step == 10
            assert reason in found.reasons[0] and "step-00000020" in found.reasons[0]
            assert "newest checkpoint that verifies" in found.reasons[1]
            assert reason in log.warnings()[-1]
            with pytest.raises(UserError, match="step-00000020 does not verify") as error:
                store.find("20")
            assert "steps 10, 20" in str(error.value)
            shutil.rmtree(newest)
            shutil.copytree(copy, newest)
        assert loaded_step(store) == 20


def test_resume_takes_what_was_asked_for_or_says_what_there_is(folder: Path) -> None:
    with CheckpointStore(folder) as store:
        assert store.find("auto") is None
        save(store, 10, 20)
        run = folder.parent
        assert store.find("never") is None
        for resume in ("10", str(folder / "step-00000010"), f"{folder}/step-00000010/"):
            assert loaded_step(store, resume) == 10
        for resume in ("auto", "20", str(run), str(folder)):
            assert loaded_step(store, resume) == 20
        moved = run / "kept for later"
        shutil.copytree(folder / "step-00000010", moved)
        assert loaded_step(store, str(moved)) == 10
        (run / "empty").mkdir()
        for resume, words in [
            ("15", "no checkpoint of step 15"),
            (str(run / "nowhere"), "does not exist"),
            (str(run / "empty"), "no checkpoint in"),
            ("newest", "allowed: auto, never, a step number"),
        ]:
            with pytest.raises(UserError, match=words):
                store.find(resume)
        with pytest.raises(UserError, match="allowed: steps 10, 20"):
            store.find("15")


def test_auto_refuses_to_start_over_when_all_checkpoints_are_damaged(folder: Path) -> None:
    with CheckpointStore(folder) as store:
        save(store, 10)
        flip_bit(tensors_file(folder / "step-00000010"), 3)
        with pytest.raises(UserError, match=r"no checkpoint in .* verifies.*step-00000010"):
            store.find("auto")
        (folder / "step-00000010" / "manifest.json").unlink()
        with pytest.raises(UserError, match=r"verifies.*step-00000010: no manifest.json"):
            store.find("auto")


def test_keep_last_counts_only_verified_ones_and_leaves_foreign_names(folder: Path) -> None:
    foreign = ["step-10-bak", "step-00000001.old", "step-000000001", "latest", ".tmp-other"]
    log = Log()
    with CheckpointStore(folder, Checkpoint(keep_last=2), log) as store:
        for name in foreign:
            (folder / name).mkdir(parents=True)
        (folder / "step-00000002").write_text("a file")
        (folder / "step-00000003").mkdir()
        save(store, 10, 20, 30)
        assert ("removed", 30) in log.states()
        assert log.events[-1][1]["path"] == str(folder / "step-00000010")
        flip_bit(tensors_file(folder / "step-00000030"), 3)
        flip_bit(tensors_file(folder / "step-00000020"), 3)
        save(store, 40)  # only 40 verifies: nothing may go
        assert {"step-00000020", "step-00000030", "step-00000040"} <= set(names(folder))
        save(store, 50, 60)
        others = [*foreign, "step-00000002", "step-00000003"]
        assert names(folder) == sorted([*others, "step-00000050", "step-00000060"])
        assert loaded_step(store) == 60
    with CheckpointStore(
        folder, Checkpoint(keep_last=1)
    ) as later:  # it did not write them, so it reads them
        flip_bit(tensors_file(folder / "step-00000060"), 3)
        save(later, 5)
        assert {"step-00000050", "step-00000005"} <= set(names(folder))
        assert loaded_step(later) == 50


def test_a_step_can_be_saved_again_and_branches_can_be_set_aside(folder: Path) -> None:
    with CheckpointStore(folder) as store:
        save(store, 10, 20)
    flip_bit(tensors_file(folder / "step-00000020"), 3)
    with CheckpointStore(folder) as store:  # another process, that took the step once more
        save(store, 20)
        assert loaded_step(store) == 20
        (aside,) = store.set_aside_after(10)
        assert store.durable_step == 10
        assert Path(aside).name.startswith("set-aside-step-00000020-")
        verify(LocalPlace(folder), Path(aside).name)
        assert loaded_step(store) == 10
        save(store, 11, 12)
        assert names(folder) == [Path(aside).name, "step-00000011", "step-00000012"]


def test_clean_removes_what_a_dead_writer_left_and_puts_back_what_it_moved(folder: Path) -> None:
    with CheckpointStore(folder) as store:
        store.clean()
        save(store, 10, 20)
        (folder / "step-00000020").rename(folder / ".tmp-replaced-step-00000020-0123456789ab")
        shutil.copytree(
            folder / "step-00000010", folder / ".tmp-replaced-step-00000010-0123456789ab"
        )
        (folder / ".tmp-step-00000030-0123456789ab").mkdir()
        (folder / ".tmp-of-somebody-else").mkdir()
        (folder / ".tmp-removed-step-00000005-0123456789ab").mkdir()
        store.clean()
        assert names(folder) == [".tmp-of-somebody-else", "step-00000010", "step-00000020"]
        assert loaded_step(store) == 20


def test_a_mismatch_is_reported_both_ways_before_anything_is_loaded(folder: Path) -> None:
    with CheckpointStore(folder) as store:
        save(store, 10)
        found = store.find()
        assert found is not None
        wanted = {"model": {"weight": torch.zeros(5, 4), "bias": torch.zeros(5)}}
        with pytest.raises(UserError) as error:
            store.load(found, wanted)
        text = str(error.value)
        assert "lacks tensors that this recipe needs: model.bias" in text
        assert "no place for: optimizer.weight.step" in text
        assert "model.weight (checkpoint [5, 3], model [5, 4])" in text
        state = tensors_of(0)
        state["model"]["weight"] = state["model"]["weight"].double()
        with pytest.raises(UserError, match=r"checkpoint torch.float32, model torch.float64"):
            store.load(found, state)
        assert not state["model"]["weight"].any()


def test_a_folder_that_fails_the_machine_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with CheckpointStore(folder) as store:
        save(store, 10)
        monkeypatch.setattr(os, "listdir", fail)
        for act in (store.clean, store.find, lambda: store.set_aside_after(0)):
            with pytest.raises(RunError, match="PermissionError") as error:
                act()
            assert str(folder) in str(error.value) and "try: " in str(error.value)
