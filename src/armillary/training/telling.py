"""What a run tells of itself, from before its log is open to its last event."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from armillary.foundation.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    ArmillaryError,
    RunError,
    Stopped,
)
from armillary.foundation.run_folder import EVENTS_FILE
from armillary.foundation.tell import tell
from armillary.parallel import process
from armillary.recipe.recipe import Recipe
from armillary.telemetry.console.choose import RunConsole
from armillary.telemetry.events import EventLog
from armillary.telemetry.open import open_event_log


class Telling:
    """The log of a run, and each of its ends.

    The log is not opened before it must: a command that is refused leaves no trace in the log of a
    finished run. What happens until then is told to it first.

    Args:
        seconds_from_signal: since this process was asked to stop; None: it was not.
    """

    def __init__(
        self, recipe: Recipe, folder: Path, seconds_from_signal: Callable[[], float | None]
    ) -> None:
        self.step: Callable[[], int] = lambda: 0
        """The newest step finished."""
        self._telemetry, self._folder = recipe.telemetry, folder
        self._seconds_from_signal = seconds_from_signal
        self._log: EventLog | None = None
        self._untold: list[tuple[str, dict[str, Any]]] = []
        self._began = time.monotonic()

    @contextmanager
    def logging(self, console: RunConsole) -> Iterator[EventLog]:
        """Opens the log; what breaks off what is done with it is its last event."""
        with open_event_log(self._telemetry, self._folder, process.rank(), console) as log:
            self._log = log
            for kind, fields in self._untold:
                self.event(kind, fields)
            try:
                yield log
            except Stopped:
                raise  # how long it took is for all ranks to say: see `stopped`
            except BaseException as error:
                self.failed(error)
                raise

    def stands_at(self, step: int) -> None:
        """For as long as nobody counts on."""
        self.step = lambda: step

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Takes an event, also from the thread that writes checkpoints."""
        if self._log is None:
            self._untold.append((kind, fields))
        else:
            self._log.emit(kind, **fields)

    def finished(self) -> None:
        """The budget is spent."""
        self._end("finished", EXIT_FINISHED)

    def stopped(self, stopped: Stopped, from_signal: float | None) -> None:
        """A request was followed, so many seconds after it."""
        self._end(str(stopped), stopped.exit_code, from_signal)

    def failed(self, error: BaseException) -> None:
        """Leaves the reason; the command line shows it to people."""
        if isinstance(error, ArmillaryError):
            message, hint = error.problems[0].message, error.problems[0].fix or ""
            code = error.exit_code
        else:
            message, hint, code = f"{type(error).__name__}: {error}", "", EXIT_FAILED
        fields = {"step": self.step(), "message": message, "where": "training", "hint": hint}
        self.event("error", fields)
        self._end("failed", code, self._seconds_from_signal())

    def stands_still(self, error: RunError, speaks: bool) -> None:
        """From a thread of the watch, which ends the process then: nothing wakes the main one.

        Args:
            speaks: whether this is the rank that writes it into the log.
        """
        tell(str(error), every_rank_sees_it=True)
        if not speaks:
            return
        if self._log is None or self._log.path is None:  # too early, or rank 0 does not answer
            self._log = EventLog(self._folder / EVENTS_FILE, process.rank())
        self.failed(error)
        log, self._log = self._log, EventLog.silent()  # what others make of the end is no news
        log.close()

    def _end(self, reason: str, exit_code: int, from_signal: float | None = None) -> None:
        fields: dict[str, Any] = {"reason": reason, "exit_code": exit_code}
        fields["step"] = self.step()
        fields["seconds"] = time.monotonic() - self._began
        if from_signal is not None:
            fields["seconds_from_signal"] = from_signal
        self.event("stop", fields)
