"""The event log: one JSON object a line, append-only, the truth about a run."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from armillary.foundation.errors import Problem, RunError
from armillary.foundation.secrets import without_secrets
from armillary.foundation.tell import tell
from armillary.telemetry.line_file import LineFile, parsed_line
from armillary.telemetry.schema import SCHEMA_VERSION, checked_event
from armillary.telemetry.sinks.sink import Sink

_DETAIL = ("step", "ranks", "sample")
"""Kinds of events that go first when those that wait for a full disk need too much memory."""

_WORDS = frozenset({"message", "hint", "where", "path", "reason"})
"""Fields made of what went wrong, which may quote an address with a password in it."""


class EventLog:
    """Appends events to a file and hands them to sinks.

    A line is one `write` to a descriptor opened for appending, so a killed process leaves whole
    lines; a line torn by a full disk or a crash of the machine is cut when the log is opened again.
    While the disk is full or gone the lines wait in memory and training goes on; see `LineFile`.

    Args:
        path: opened, or created; None keeps no file (ranks other than 0).
        rank: this process's.
        sinks: views that hear of each event.
        clock: seconds since the epoch.
        patience_seconds: how long `close` insists on lines that cannot be written.
    """

    def __init__(
        self,
        path: Path | None,
        rank: int = 0,
        sinks: Sequence[Sink] = (),
        *,
        clock: Callable[[], float] = time.time,
        patience_seconds: float = 10.0,
    ) -> None:
        self.path = path
        self.rank = rank
        self._clock = clock
        self._patience_seconds = patience_seconds
        self._lock = threading.RLock()
        self._sinks = list(sinks)
        self._closed = False
        self._told_of_failure = False
        self._file = None if path is None else LineFile(path)
        if self._file is not None and self._file.cut:
            self.warn(
                f"cut {self._file.cut} bytes of an incomplete last line",
                where=self._file.path.name,
                hint="the machine went down, or its disk was full, while it was written",
            )

    @classmethod
    def silent(cls, rank: int = 0) -> EventLog:
        """A log that keeps nothing, for ranks that do not speak."""
        return cls(None, rank)

    def emit(self, kind: str, step: int, **fields: object) -> dict[str, Any]:
        """Appends one event and returns it as written.

        Args:
            kind: A kind of `schema.REQUIRED`.
            step: The optimizer step just finished, counting from 1; 0 before the first.
            fields: The kind's fields.

        Raises:
            ValueError: a required field is missing.
        """
        if kind == "start":
            process = {"schema": SCHEMA_VERSION, "host": socket.gethostname(), "pid": os.getpid()}
            fields = process | fields
        for name in _WORDS.intersection(fields):
            value = fields[name]
            fields[name] = without_secrets(value) if isinstance(value, str) else value
        event = checked_event(kind, time=self._clock(), rank=self.rank, step=step, fields=fields)
        with self._lock:
            self._append(event)
            self._show(event)
        return event

    def warn(self, message: str, *, where: str = "", hint: str = "", step: int = 0) -> None:
        """Appends a `warning`."""
        self.emit("warning", step, message=message, where=where, hint=hint)

    def close(self) -> None:
        """Makes the file durable and closes the sinks. Further events are an error."""
        with self._lock:
            if self._closed:
                return
            for sink in list(self._sinks):
                self._guarded(sink, sink.close, step=0)
            self._sinks.clear()
            if self._file is not None and (lost := self._file.close(self._patience_seconds)):
                tell(f"warning: {lost} events could not be written: {self._why(self._file)}")
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _append(self, event: dict[str, Any]) -> None:
        assert not self._closed, "the log is closed"
        if self._file is None:
            return
        line = json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        if self._file.append(data, detail=event["kind"] in _DETAIL):
            self._told_of_failure = False
            if dropped := self._file.dropped:
                self._file.dropped = 0
                message = f"{dropped} events are missing: there was no room for them to wait"
                self.warn(message, where="events", hint="the oldest steps went first")
        elif not self._told_of_failure:
            self._told_of_failure = True
            message = f"cannot write {self._why(self._file)}"
            hint = "free some space, or bring the disk back; events wait in memory until then"
            self.warn(message, where="events", hint=hint, step=event["step"])

    @staticmethod
    def _why(file: LineFile) -> str:
        return f"{file.path}: {file.failure}"

    def _show(self, event: dict[str, Any]) -> None:
        for sink in list(self._sinks):
            self._guarded(sink, partial(sink.on_event, event), step=event["step"])

    def _guarded(self, sink: Sink, act: Callable[[], object], *, step: int) -> None:
        """A view that fails is dropped with one warning; it never stops training."""
        try:
            act()
        except Exception as error:
            if sink in self._sinks:
                self._sinks.remove(sink)
            name = type(sink).__name__
            self.warn(
                f"{name} failed and is off for the rest of this run: {error!r}",
                where="telemetry",
                hint="events.jsonl is complete without it",
                step=step,
            )


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a log, in order. A torn last line, as in a log being written, is left out.

    Raises:
        RunError: a line before the last is broken.
    """
    with path.open("rb") as file:
        broken: int | None = None
        for number, line in enumerate(file, 1):
            if broken is not None:
                raise RunError(
                    Problem(
                        f"{path}, line {broken}: not an event",
                        allowed="one JSON object a line",
                        fix="restore the file from a copy, or remove that line",
                    )
                )
            event = parsed_line(line) if line.endswith(b"\n") else None
            if event is None:
                broken = number
            else:
                yield event
