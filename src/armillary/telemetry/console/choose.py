"""Which console suits the place where a process runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TextIO

from rich.console import Console

from armillary.foundation.progress import Advance, NoProgress
from armillary.telemetry.console.live import LiveConsole
from armillary.telemetry.console.plain import PlainConsole


class RunConsole(Protocol):
    """A view of events that can show long work too: a `Sink` and a `Progress`."""

    def on_event(self, event: Mapping[str, Any]) -> None:
        """See `Sink.on_event`."""

    def task(
        self, label: str, total: float | None = None, unit: str = ""
    ) -> AbstractContextManager[Advance]:
        """See `Progress.task`."""

    def close(self) -> None:
        """See `Sink.close`."""


class SilentConsole(NoProgress):
    """Shows nothing."""

    def on_event(self, event: Mapping[str, Any]) -> None:
        """See `Sink.on_event`."""

    def close(self) -> None:
        """See `Sink.close`."""


def open_console(
    mode: str = "auto",
    *,
    rank: int = 0,
    log_every: int = 1,
    stream: TextIO | None = None,
    environment: Mapping[str, str] | None = None,
) -> RunConsole:
    """The console of this process: silent on ranks other than 0.

    `auto` is live when standard error is a terminal that can move its cursor and neither `CI` nor
    `TERM=dumb` is set; else plain.
    """
    stream = sys.stderr if stream is None else stream
    environment = os.environ if environment is None else environment
    if rank != 0 or mode == "off":
        return SilentConsole()
    ci = environment.get("CI", "").lower() not in ("", "0", "false")
    terminal = stream.isatty() and environment.get("TERM") != "dumb" and not ci
    if mode == "live" or (mode == "auto" and terminal):
        return LiveConsole(Console(file=stream, highlight=False, soft_wrap=False))
    return PlainConsole(stream, log_every)
