"""Which rank the others wait for. Loads no torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

SLOW = 1.3
"""Times the median of all ranks: a rank that is busy for longer holds the others up."""
_IN_A_ROW = 3
"""Reports in which the same rank has to be slow before it is worth a warning."""
_LEAST_SECONDS = 10.0
"""A shorter report tells too little: how long a rank waits is only looked at now and then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSeconds:
    """Where a rank's time went: seconds of a step, in the mean over those of a report."""

    step: float
    """All of it; much the same on every rank, as they wait for each other."""
    busy: float
    """Without what was seen to be spent waiting for other ranks."""
    data: float
    """Waiting for data."""
    garbage: float
    """Collecting Python's garbage."""
    checkpoint: float
    """Waiting for a save."""

    def row(self) -> list[float]:
        """For one small collective."""
        return list(astuple(self))

    @classmethod
    def of(cls, row: Sequence[float]) -> RankSeconds:
        """See `row`."""
        names = [each.name for each in fields(cls)]
        return cls(**dict(zip(names, row, strict=True)))


class RanksReport:
    """What the ranks of a run report, one report after the other.

    Args:
        hosts: of each rank.
        least_seconds: of a report that may lead to a warning.
    """

    def __init__(self, hosts: Sequence[str], least_seconds: float = _LEAST_SECONDS) -> None:
        self._hosts = hosts
        self._least_seconds = least_seconds
        self._slow: int | None = None
        self._in_a_row = 0

    def event(self, ranks: Sequence[RankSeconds], steps: int) -> dict[str, Any]:
        """Fields of a `ranks` event over `steps` steps."""
        slowest = max(range(len(ranks)), key=lambda rank: ranks[rank].busy)
        ratio = ranks[slowest].busy / max(_median(ranks), 1e-9)
        self._count(slowest, ratio, ranks[slowest].step * steps)
        return {
            "steps": steps,
            "slowest": slowest,
            "slowest_host": self._hosts[slowest],
            "slowest_over_median": ratio,
            **{
                f"{each.name}_seconds": _spread([getattr(rank, each.name) for rank in ranks])
                for each in fields(RankSeconds)
            },
        }

    def warning(self, event: dict[str, Any]) -> str | None:
        """What to say of this event, if its rank was slow often enough; said once."""
        if self._in_a_row != _IN_A_ROW:
            return None
        busy = event["busy_seconds"]
        return (
            f"rank {event['slowest']} ({event['slowest_host']}) holds the others up: it is busy for"
            f" {busy['max']:.3g} s of a step, {event['slowest_over_median']:.2f} times the median"
            f" {busy['median']:.3g} s of all ranks, in {_IN_A_ROW} reports in a row"
        )

    def _count(self, slowest: int, ratio: float, seconds: float) -> None:
        slow = slowest if ratio > SLOW and seconds >= self._least_seconds else None
        if slow != self._slow:
            self._in_a_row = 0
        self._in_a_row += slow is not None
        self._slow = slow


def _median(ranks: Sequence[RankSeconds]) -> float:
    return statistics.median(rank.busy for rank in ranks)


def _spread(values: Sequence[float]) -> dict[str, float]:
    """The least, the middle and the most, and which rank has the most."""
    most = max(values)
    middle = statistics.median(values)
    return {"min": min(values), "median": middle, "max": most, "rank": values.index(most)}
