"""A stop that all ranks take at the same point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from armillary.checkpoint.ranks import Ranks
from armillary.resilience.signals import Stopped, StopRequest


@dataclass(frozen=True, slots=True)
class AgreedStop:
    """What this process was asked, and the ranks that must hear of it."""

    request: StopRequest
    """Of this process; to be asked in work that `Ranks` runs, which tells the others."""
    ranks: Ranks

    def check(self) -> None:
        """A point where a run can end; all ranks come here together.

        Raises:
            Stopped: some rank was asked to stop.
        """
        self.sums(())

    def sums(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """The sums of numbers over all ranks: `check` on the way of sums that are needed anyway.

        Raises:
            Stopped: some rank was asked to stop.
        """
        totals, stop = self.ranks.sums_and_any(numbers, self.request.requested)
        if stop:
            names = self.ranks.together(lambda: self.request.signal_name)
            raise Stopped(next(filter(None, names)))  # the same on every rank
        return totals

    def seconds(self) -> float | None:
        """Since the first signal that any rank got; all ranks ask together. None: none got one."""
        found = self.ranks.together(lambda: self.request.seconds)
        return max((each for each in found if each is not None), default=None)
