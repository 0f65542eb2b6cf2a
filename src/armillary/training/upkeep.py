"""What is seen to around the steps: signs of progress, garbage, and who holds the others up."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from armillary.checkpoint.ranks import Ranks
from armillary.parallel import process
from armillary.resilience.garbage import Garbage
from armillary.resilience.watchdog import Watch
from armillary.resilience.watchdog_config import Watchdog
from armillary.telemetry.events import EventLog
from armillary.telemetry.ranks_report import RankSeconds, RanksReport
from armillary.telemetry.timing import StepSeconds

_HINT = "look at that host: other processes, clock rates, its disk and its network"


class Upkeep:
    """Every rank makes one and calls it alike; rank 0 tells."""

    def __init__(self, config: Watchdog, watch: Watch, ranks: Ranks, log: EventLog) -> None:
        self._watch, self._log = watch, log
        self._garbage = Garbage(config.garbage_collection)
        self._every = config.ranks_every if ranks.size > 1 else 0
        self._report = RanksReport(ranks.together(socket.gethostname) if self._every else [])
        self._forget()

    @contextmanager
    def around_steps(self) -> Iterator[None]:
        """From before the first step to after the last."""
        try:
            with self._garbage.kept():
                yield
        finally:
            self._watch.stepping = False

    def step_done(self, step: int, seconds: StepSeconds) -> None:
        """After each step."""
        first = not self._watch.stepping
        self._watch.step, self._watch.stepping = step, True
        self._garbage.step_done(step)
        if first:  # it compiled, and filled caches: no measure of a rank
            self._forget()
            return
        self._steps += 1
        self._seconds += seconds.step
        self._data += seconds.data
        self._checkpoint += seconds.checkpoint
        if self._every and step % self._every == 0:
            self._tell(step)
            self._forget()

    def _tell(self, step: int) -> None:
        steps = self._steps
        waiting = self._watch.waiting_seconds - self._waiting_before
        own = RankSeconds(
            step=self._seconds / steps,
            busy=max(0.0, self._seconds - waiting) / steps,
            data=self._data / steps,
            garbage=(self._garbage.seconds - self._garbage_before) / steps,
            checkpoint=self._checkpoint / steps,
        )
        rows = process.gather(own.row())
        if not rows:
            return
        event = self._report.event([RankSeconds.of(row) for row in rows], steps)
        self._log.emit("ranks", step, **event)
        if warning := self._report.warning(event):
            self._log.warn(warning, where="ranks", hint=_HINT, step=step)

    def _forget(self) -> None:
        """Begins a report."""
        self._steps = 0
        self._seconds = self._data = self._checkpoint = 0.0
        self._waiting_before = self._watch.waiting_seconds
        self._garbage_before = self._garbage.seconds
