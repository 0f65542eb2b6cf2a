"""What stays and what goes."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_examples import Log, flip_bit, save, tensors_file

from armillary.checkpoint.config import Checkpoint
from armillary.checkpoint.places.local import LocalPlace
from armillary.checkpoint.places.place import Place, Written
from armillary.checkpoint.retention import Shelf, read_pins, shelved_in, write_pins
from armillary.checkpoint.room import copies_needed, require_room
from armillary.checkpoint.store import CheckpointStore
from armillary.foundation.errors import UserError


def steps_in(folder: Path) -> list[int]:
    return sorted(each.step for each in shelved_in(LocalPlace(folder)))


def kinds_in(folder: Path) -> dict[int, str]:
    return {each.step: each.manifest["kind"] for each in shelved_in(LocalPlace(folder))}


def test_every_nth_step_stays_for_good_and_ephemeral_ones_until_the_next(tmp_path: Path) -> None:
    config = Checkpoint(every=4, keep_last=1, keep_every=10, ephemeral_every=2)
    with CheckpointStore(tmp_path, config) as store:
        seen = {}
        for step in range(1, 25):
            if config.is_due(step):
                save(store, step)
                seen[step] = steps_in(tmp_path)
    assert seen[2] == [2]
    assert seen[4] == [4]  # a newer one is durable, so the ephemeral one goes
    assert seen[6] == [4, 6]
    assert seen[8] == [8]
    assert seen[10] == [10] and seen[14] == [10, 12, 14] and seen[16] == [10, 16]
    assert seen[24] == [10, 20, 24]
    assert kinds_in(tmp_path) == {10: "permanent", 20: "permanent", 24: "kept"}


def test_an_ephemeral_one_stays_while_nothing_newer_verifies(tmp_path: Path) -> None:
    config = Checkpoint(keep_last=1, ephemeral_every=2)
    with CheckpointStore(tmp_path, config) as store:
        save(store, 2, 4)
        flip_bit(tensors_file(tmp_path / "step-00000004"), 5)
        # A save of an older step, as after going back, is the newest that is proven.
        assert Shelf(store.place, config).thin(4) == []
        save(store, 3)
        assert steps_in(tmp_path) == [3, 4]


def test_the_best_by_a_score_stay_and_those_without_a_score_do_not_count(tmp_path: Path) -> None:
    config = Checkpoint(keep_last=1, keep_best=2, best_metric="held-out")
    scores = {1: 3.0, 2: 1.0, 3: float("nan"), 4: 2.0, 5: 5.0, 6: 1.5}
    with CheckpointStore(tmp_path, config) as store:
        for step, score in scores.items():
            save(store, step, scores={"held-out": score, "other": -step})
        assert steps_in(tmp_path) == [2, 6]
        flip_bit(tensors_file(tmp_path / "step-00000002"), 5)
        save(store, 7)  # a damaged best is none, and is not kept as one
        assert steps_in(tmp_path) == [6, 7]


def test_a_best_one_that_cannot_be_read_for_now_stays_and_a_damaged_one_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Checkpoint(keep_last=1, keep_best=1)
    with CheckpointStore(tmp_path, config) as store:
        save(store, 1, scores={"validation": 1.0})
        save(store, 2, scores={"validation": 2.0})
    with CheckpointStore(tmp_path, config) as store:  # another process: it has proven nothing yet
        with monkeypatch.context() as patch:
            patch.setattr(LocalPlace, "chunks", unreadable)
            save(store, 3)
        assert steps_in(tmp_path) == [1, 2, 3]  # either may be the best that is whole
        save(store, 4)
        assert steps_in(tmp_path) == [1, 4]
    flip_bit(tensors_file(tmp_path / "step-00000004"), 5)
    shelf = Shelf(LocalPlace(tmp_path), Checkpoint(keep_last=1, keep_best=1))
    assert shelf.thin(4) == []
    monkeypatch.setattr(LocalPlace, "chunks", read_again)
    assert shelf.thin(4) == []


def unreadable(self: LocalPlace, name: str) -> Iterator[bytes]:
    raise OSError(errno.EIO, "Input/output error")


def read_again(self: LocalPlace, name: str) -> Iterator[bytes]:
    raise AssertionError(f"{name} has not changed since it was read")


def test_pinned_ones_stay_until_they_are_no_longer_pinned(tmp_path: Path) -> None:
    log = Log()
    with CheckpointStore(tmp_path, Checkpoint(keep_last=1), log) as store:
        save(store, 1)
        write_pins(store.place, {1})
        save(store, 2, 3)
        assert steps_in(tmp_path) == [1, 3]
        assert read_pins(store.place) == {1}
        write_pins(store.place, set())
        save(store, 4)
        assert steps_in(tmp_path) == [4]
    assert ("removed", 4) in log.states()


def test_what_the_last_step_leaves_is_called_final(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, Checkpoint(ephemeral_every=5)) as store:
        store.save(5, {}, {}, final=True)
        store.wait()
    assert kinds_in(tmp_path) == {5: "final"}


def test_wrong_values_are_all_named_with_what_is_right() -> None:
    wrong = Checkpoint(
        every=-1, keep_last=0, keep_every=-1, keep_best=-1, ephemeral_every=-2,
        retry_seconds=float("nan"), folder="somewhere",
    )  # fmt: skip
    text = "\n".join(problem.render() for problem in wrong.problems())
    for words in ("every = -1", "keep_last = 0", "retry_seconds = nan", "'somewhere' is relative"):
        assert words in text
    assert len(wrong.problems()) == 7
    assert Checkpoint(folder="s3://bucket/run").problems() == []


def test_room_is_asked_for_what_stays_and_what_is_being_written(tmp_path: Path) -> None:
    often = Checkpoint(every=1, keep_last=2)
    assert copies_needed(often, there=0, total_steps=100) == 3
    assert copies_needed(often, there=5, total_steps=100) == 1
    assert copies_needed(Checkpoint(keep_last=2), there=0, total_steps=100) == 1  # only the end
    assert copies_needed(Checkpoint(every=60, keep_last=5), there=0, total_steps=100) == 2
    wide = Checkpoint(keep_last=2, keep_best=3, ephemeral_every=1, keep_every=10)
    assert copies_needed(wide, there=0, total_steps=100) == 8
    place = LocalPlace(tmp_path / "new")
    require_room(place, 1)
    assert place.names() == []  # the trial is gone
    with pytest.raises(UserError, match=r"has .*B free, but this run needs about .*B"):
        require_room(place, 10**18)


@pytest.mark.parametrize(
    ("number", "words"), [(28, "no space left"), (30, "Read-only"), (13, "Permission denied")]
)
def test_a_place_that_takes_no_trial_file_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    place: Place = LocalPlace(tmp_path)

    def refuse(*_: object) -> Written:
        raise OSError(number, "refused")

    monkeypatch.setattr(place, "write", refuse)
    with pytest.raises(UserError, match=f"(?s){words}.*--checkpoint.folder") as error:
        require_room(place, 1)
    assert str(tmp_path) in str(error.value)
