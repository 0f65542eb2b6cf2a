"""A polite stop: signals set a flag, the run ends itself with its state saved. Imports no torch."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from armillary.foundation.errors import EXIT_INTERRUPTED, Stopped

__all__ = ["StopRequest", "Stopped"]

_STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1")
# A launcher and the terminal each pass on one Ctrl-C, so one press may arrive here twice.
_SAME_PRESS_SECONDS = 1.0


class StopRequest:
    """Turns SIGINT, SIGTERM and SIGUSR1 into a flag, while entered; main thread only.

        with StopRequest() as stop:
            for document in corpus:
                stop.check()          # raises Stopped
                ...

    A second SIGINT, a second or more after the first, leaves at once with exit code 130. Published
    checkpoints are whole at any moment, so that costs at most the one being written.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self.signal_name: str | None = None
        """The signal that asked first, e.g. `SIGTERM`; None while nobody has."""
        self._clock = clock
        self._leave = leave
        self._interrupted_at: float | None = None
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop. Other ranks may not know; agree first."""
        return self.signal_name is not None

    def check(self) -> None:
        """For long phases that can end between two pieces of work.

        Raises:
            Stopped: a stop was requested.
        """
        if self.signal_name is not None:
            raise Stopped(self.signal_name)

    def __enter__(self) -> StopRequest:
        for name in _STOP_SIGNALS:
            number = getattr(signal, name, None)  # not every system has all of them
            if number is not None:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            # None: it was installed by something other than python, and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = self._clock()
            if self._interrupted_at is None:
                self._interrupted_at = now
            elif now - self._interrupted_at >= _SAME_PRESS_SECONDS:
                # os.write: a handler may have interrupted a print.
                os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"\nleaving at once\n")
                self._leave(EXIT_INTERRUPTED)
        if self.signal_name is None:
            self.signal_name = signal.Signals(number).name
