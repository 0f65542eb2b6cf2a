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
    """Of this process alone; to be asked in work that `Ranks` runs, which tells the others."""
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
            raise Stopped(self.request.signal_name or "another rank")
        return totals
