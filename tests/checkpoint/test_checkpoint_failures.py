"""Saves that fail: reported, tried again, and nothing that was there is harmed."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_examples import Log, files_in, loaded_step, names, save, tensors_of

from armillary.checkpoint import store as store_module
from armillary.checkpoint import writing
from armillary.checkpoint.config import Checkpoint
from armillary.checkpoint.staging import Stager
from armillary.checkpoint.store import CheckpointStore
from armillary.checkpoint.writing import STAGES, Patience
from armillary.foundation.errors import RunError

SYNCHRONOUS = Checkpoint(keep_last=1, asynchronous=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


class Disk:
    """Full at one stage of a write, while it is full."""

    def __init__(self, stage: str = "tensors", number: int = errno.ENOSPC) -> None:
        self.full = False
        self.refused = threading.Event()
        self._stage, self._number = stage, number

    def __call__(self, stage: str) -> None:
        if self.full and stage == self._stage:
            self.refused.set()
            raise OSError(self._number, "No space left on device")


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_a_full_disk_at_any_stage_is_reported_and_harms_nothing(
    folder: Path, stage: str, asynchronous: bool
) -> None:
    log, disk = Log(), Disk(stage)
    config = Checkpoint(keep_last=1, asynchronous=asynchronous)
    with CheckpointStore(folder, config, log, on_stage=disk) as store:
        save(store, 10)
        before = {name: (folder / name).read_bytes() for name in files_in(folder)}
        disk.full = True
        save(store, 20)
        assert any("the disk is full" in text or stage == "thin" for text in log.warnings())
        if stage == "thin":  # the checkpoint itself is there
            assert log.states()[-1] == ("durable", 20)
        else:
            assert log.states()[-1] == ("failed", 20)
            assert {name: (folder / name).read_bytes() for name in files_in(folder)} == before
            assert store.durable_step == 10
        disk.full = False
        save(store, 30)
        store.wait(raise_failure=True)
        assert loaded_step(store) == 30
    assert names(folder) == ["step-00000030"]


def test_what_a_save_meets_is_told_with_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log()

    def read_only(self: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with CheckpointStore(folder, on_event=log) as store:
        save(store, 10)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "mkdir", read_only)
            save(store, 20)
        with monkeypatch.context() as patch:
            patch.setattr(Stager, "_buffer_for", lambda *_: torch.empty(1 << 60))
            save(store, 30)
        forbidden, memory = log.warnings()
        assert "Read-only file system" in forbidden and "cannot be written to" in forbidden
        assert "no copy of the state could be made" in memory
        assert ("staged", 30) not in log.states()
        assert names(folder) == ["step-00000010"]
        assert loaded_step(store) == 10


def test_a_failed_save_is_tried_again_from_its_copy_until_it_succeeds(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_LONGEST_PAUSE", 0.01)
    log, disk = Log(), Disk()
    disk.full = True
    durable = threading.Event()

    def tell(kind: str, fields: dict[str, Any]) -> None:
        log(kind, fields)
        if fields.get("state") == "durable":
            durable.set()

    with CheckpointStore(folder, on_event=tell, on_stage=disk) as store:
        tensors = tensors_of(10)
        store.save(10, tensors, {"tokens_total": 1000})
        store.wait_until_staged()
        assert disk.refused.wait(30)
        tensors["model"]["weight"].zero_()  # training goes on
        disk.full = False
        assert durable.wait(30)
        assert store.durable_step == 10
        assert loaded_step(store) == 10
    states = log.states()
    assert states[0] == ("staged", 10) and states[-1] == ("durable", 10)
    assert set(states[1:-1]) == {("failed", 10)}
    assert next(f["tries"] for _, f in log.events if f.get("state") == "failed") == 1
    assert len(log.warnings()) == 1  # once, however often it is tried


def test_a_newer_save_takes_the_place_of_one_that_fails(folder: Path) -> None:
    log, disk = Log(), Disk()
    with CheckpointStore(folder, Checkpoint(keep_last=1), log, on_stage=disk) as store:
        save(store, 10)
        disk.full = True
        store.save(20, tensors_of(20), {})
        assert disk.refused.wait(30)
        assert "step-00000010" in names(folder)  # nothing older goes
        disk.full = False
        save(store, 30)
    assert log.states()[2:] == [
        ("staged", 20),
        ("failed", 20),
        ("failed", 20),
        ("staged", 30),
        ("durable", 30),
        ("removed", 30),
    ]
    given_up = [f for _, f in log.events if f.get("superseded")]
    assert [f["step"] for f in given_up] == [20]


@pytest.mark.parametrize("config", [Checkpoint(retry_seconds=30), SYNCHRONOUS])
def test_the_end_of_a_run_insists_on_a_save_that_fails(
    folder: Path, config: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_PAUSE_AT_THE_END", 0.01)
    disk = Disk()
    refusals = 0

    def mend_it(stage: str) -> None:
        nonlocal refusals
        refusals += stage == "open"
        disk.full = refusals < 3
        disk(stage)

    with CheckpointStore(folder, config, on_stage=mend_it) as store:
        store.save(10, tensors_of(10), {"tokens_total": 1000})
        store.wait(raise_failure=True)
        assert refusals == 3
        assert loaded_step(store) == 10


@pytest.mark.parametrize("config", [Checkpoint(), SYNCHRONOUS])
def test_a_run_that_cannot_save_its_end_says_what_is_the_newest_durable(
    folder: Path, config: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk()
    with CheckpointStore(folder, config, on_stage=disk) as store:
        save(store, 10)
        disk.full = True
        store.save(20, tensors_of(20), {})
        words = r"step-00000020 was not written.*No space left.*newest durable: step 10"
        with pytest.raises(RunError, match=words):
            store.wait(raise_failure=True, retry_seconds=0)
        store.save(30, tensors_of(30), {})
        # Asked to stop, it does not insist for the whole time that the recipe allows.
        monkeypatch.setattr(store_module, "STOP_GRACE_SECONDS", 0.0)
        with pytest.raises(RunError, match="step-00000030 was not written"):
            store.wait(raise_failure=True, stop_asked=lambda: True)


def test_without_a_copy_the_next_tries_are_1_2_4_and_8_steps_later(folder: Path) -> None:
    disk, saved = Disk(), []
    with CheckpointStore(folder, SYNCHRONOUS, on_stage=disk) as store:
        for step in range(1, 40):
            store.wait_until_staged()  # the tensors are about to change
            disk.full = step < 30
            if step == 5 or store.retry_due(step):
                saved.append(step)
                store.save(step, tensors_of(step), {"tokens_total": 100 * step})
        assert saved == [5, 6, 8, 12, 20, 36]
        assert loaded_step(store) == 36


def test_a_save_without_a_copy_is_not_tried_again_once_its_tensors_may_change(
    folder: Path,
) -> None:
    disk = Disk()
    disk.full = True
    with CheckpointStore(folder, SYNCHRONOUS, on_stage=disk) as store:
        store.save(5, tensors_of(5), {})
        store.wait_until_staged()
        disk.full = False
        with pytest.raises(RunError, match="step-00000005 was not written"):
            store.wait(raise_failure=True, retry_seconds=5)
    assert not folder.exists() or names(folder) == []


def test_patience_lasts_until_somebody_waits_for_the_end() -> None:
    patience = Patience()
    waiting = threading.Timer(0.05, patience.end_after, (0,))
    waiting.start()
    assert not patience.pause(7)  # a minute, cut short
    assert not patience.pause(1)
    patience = Patience()
    patience.end_after(60)
    assert patience.pause(1)


def test_a_second_save_of_the_same_step_lets_the_first_go_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_PAUSE_AT_THE_END", 0.01)
    log, disk = Log(), Disk()
    disk.full = True
    with CheckpointStore(folder, on_event=log, on_stage=disk) as store:
        store.save(10, tensors_of(10), {"tokens_total": 1000})
        assert disk.refused.wait(30)
        disk.full = False
        store.save(10, tensors_of(10), {"tokens_total": 1000})
        store.wait(raise_failure=True)
        store.save(10, tensors_of(10), {"tokens_total": 1000})  # it is durable already
        store.wait()
        assert log.states() == [("staged", 10), ("failed", 10), ("durable", 10)]
        with pytest.MonkeyPatch.context() as patch:  # without a copy there is nothing to go on
            patch.setattr(Stager, "_buffer_for", lambda *_: torch.empty(1 << 60))
            store.save(20, tensors_of(20), {"tokens_total": 2000})
        store.wait()
        store.save(20, tensors_of(20), {"tokens_total": 2000})
        store.wait(raise_failure=True)
        assert loaded_step(store) == 20
        store.set_aside_after(10)  # another branch: its step 20 is another state
        store.save(20, tensors_of(20), {"tokens_total": 2000})
        store.wait(raise_failure=True)
        assert loaded_step(store) == 20
