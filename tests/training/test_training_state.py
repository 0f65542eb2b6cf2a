"""Which samples the next steps read, and what a checkpoint says of a position."""

from __future__ import annotations

import json

import pytest

from armillary.foundation.errors import UserError
from armillary.training.state import Position


def read_by(position: Position, steps: int, count: int) -> list[int]:
    """The samples of the next steps, in order."""
    found: list[int] = []
    for _ in range(steps):
        samples = position.samples(count)
        position = position.after(samples)
        found += range(*samples)
    return found


def test_samples_that_are_jumped_over_are_the_only_ones_not_read() -> None:
    position = Position(cursor=20)
    position.jump(24, 32)
    position.jump(0, 12)  # read already
    position.jump(32, 36)
    position.jump(44, 48)
    assert position.jumped == [[24, 36], [44, 48]]
    assert read_by(position, 4, 4) == [*range(20, 24), *range(36, 44), *range(48, 52)]
    # A step that would reach into them begins behind them, also where steps have become longer.
    assert read_by(position, 2, 5) == [*range(36, 41), *range(48, 53)]
    again = Position.from_scalars(
        json.loads(json.dumps(position.scalars())), data_fingerprint="", path=""
    )
    assert again == position


def test_a_border_is_noted_with_its_step_and_what_was_healthy_before_it_is_forgotten() -> None:
    before = Position(step=8, cursor=128, data_fingerprint="a", recent=[[1.0, 2.0]], rewinds=1)
    at = before.across("b").across("c")
    assert at.borders == [[8, 128], [8, 128]]
    assert (at.step, at.cursor, at.data_fingerprint, at.rewinds) == (8, 128, "c", 1)
    assert at.recent == []
    assert (before.borders, before.data_fingerprint) == ([], "a")
    assert Position.read(json.loads(json.dumps(at.scalars())), path="") == at


def test_positions_of_runs_before_there_were_stages_are_read_and_damaged_ones_are_not() -> None:
    scalars = Position(step=3, cursor=48).scalars()
    assert Position.read({k: v for k, v in scalars.items() if k != "borders"}, path="") == Position(
        step=3, cursor=48
    )
    for borders in ([8], [[8]], [[8, -1]], [["8", 1]], [[8, 1.5]], {"8": 1}, None):
        with pytest.raises(UserError, match="does not say how far the run has come"):
            Position.read({**scalars, "borders": borders}, path="step-00000003")
