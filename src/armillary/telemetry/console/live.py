"""The live panel on a terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from armillary.foundation.progress import Advance, mark
from armillary.telemetry.console.panel import Picture, TaskState
from armillary.telemetry.console.plain import event_line
from armillary.telemetry.console.state import RunState
from armillary.telemetry.format import duration
from armillary.telemetry.text import printable

_REFRESH_PER_SECOND = 2
_SHOWN_IN_PANEL = ("step",)
_SPOKEN_AFTER = 2.0


class LiveConsole:
    """Sink and progress as a panel that redraws itself; what should stay is printed above it."""

    def __init__(self, console: Console) -> None:
        """Draws nothing before the first event or task. `console` writes to standard error."""
        self._console = console
        self._state = RunState()
        self._tasks: list[TaskState] = []
        self._lock = threading.RLock()
        self._live: Live | None = None

    def on_event(self, event: Mapping[str, Any]) -> None:
        """See `Sink.on_event`."""
        with self._lock:
            self._state.take(event)
        self._open()
        line = event_line(event, self._state) if event["kind"] not in _SHOWN_IN_PANEL else None
        if line is not None:
            style = "yellow" if event["kind"] == "warning" else "dim"
            self._console.print(Text(printable(line), style=style), soft_wrap=True)
        if event["kind"] == "stop":
            self.close()

    @contextmanager
    def task(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Advance]:
        """See `Progress.task`."""
        mark(label)
        task = TaskState(label, total, unit, begun=time.monotonic())
        with self._lock:
            self._tasks.append(task)
        self._open()

        def advance(amount: float) -> None:
            mark()
            with self._lock:
                task.done += amount

        try:
            yield advance
            took = time.monotonic() - task.begun
            if took >= _SPOKEN_AFTER:
                self._console.print(Text(f"{printable(label)}: done in {duration(took)}"))
        finally:
            with self._lock:
                self._tasks.remove(task)
                last = not self._tasks and self._state.started is None
            if last:
                self.close()

    def close(self) -> None:
        """See `Sink.close`. Leaves the last frame on the screen and gives the cursor back."""
        with self._lock:
            live, self._live = self._live, None
        if live is not None:
            live.stop()

    def picture(self) -> RenderableType:
        """The frame of this moment."""
        return Picture(self._state, tuple(self._tasks), time.monotonic())

    def _open(self) -> None:
        with self._lock:
            if self._live is not None or self._state.stopped:
                return
            self._live = Live(
                get_renderable=self.picture,
                console=self._console,
                refresh_per_second=_REFRESH_PER_SECOND,
                redirect_stdout=False,
                redirect_stderr=True,
                vertical_overflow="crop",
            )
            self._live.start()
