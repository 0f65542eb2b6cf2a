"""Which samples the next steps read, and what a checkpoint says of a position."""

from __future__ import annotations

import json

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
