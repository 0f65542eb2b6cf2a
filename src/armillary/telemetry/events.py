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
from armillary.telemetry.schema import SCHEMA_VERSION, checked_event
from armillary.telemetry.sinks.sink import Sink

_MAX_UNWRITTEN_BYTES = 64 * 2**20


class EventLog:
    """Appends events to a file and hands them to sinks.

    A line is one `write` to a descriptor opened for appending, so a killed process leaves whole
    lines; a line torn by a full disk or a crash of the machine is cut when the log is opened again.
    When the disk is full the lines wait in memory and training goes on.
    """

    def __init__(
        self,
        path: Path | None,
        rank: int = 0,
        sinks: Sequence[Sink] = (),
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Opens, or creates, the log at `path`; None keeps no file (ranks other than 0)."""
        self.path = path
        self.rank = rank
        self._clock = clock
        self._lock = threading.RLock()
        self._sinks = list(sinks)
        self._unwritten = bytearray()
        self._write_failed = False
        self._closed = False
        self._descriptor: int | None = None
        if path is not None:
            cut = cut_torn_tail(path)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            if cut:
                self.warn(
                    f"cut {cut} bytes of an incomplete last line",
                    where=path.name,
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
            if self._descriptor is not None:
                self._write_out()
                os.fsync(self._descriptor)
                os.close(self._descriptor)
                self._descriptor = None
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
        if self._descriptor is None:
            return
        line = json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        self._unwritten += line.encode("utf-8", "backslashreplace") + b"\n"
        self._write_out()

    def _write_out(self) -> None:
        """Writes what waits; when that fails, it keeps waiting, and the sinks are told once."""
        assert self._descriptor is not None
        try:
            while self._unwritten:
                written = os.write(self._descriptor, self._unwritten)
                del self._unwritten[:written]
            self._write_failed = False
        except OSError as error:
            if len(self._unwritten) > _MAX_UNWRITTEN_BYTES:
                raise RunError(
                    Problem(f"{self.path}: {error.strerror}", fix="free space on this disk")
                ) from error
            if not self._write_failed:
                self._write_failed = True
                self._show(
                    checked_event(
                        "warning",
                        time=self._clock(),
                        rank=self.rank,
                        step=0,
                        fields={
                            "message": f"cannot write {self.path}: {error.strerror}",
                            "where": "events",
                            "hint": "free some space; events wait in memory until then",
                        },
                    )
                )

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


def cut_torn_tail(path: Path) -> int:
    """Cuts what follows the last whole line; returns how many bytes that was."""
    if not path.exists():
        return 0
    size = path.stat().st_size
    whole = _end_of_last_whole_line(path, size)
    if whole < size:
        os.truncate(path, whole)
    return size - whole


def _end_of_last_whole_line(path: Path, size: int) -> int:
    """Offset after the last line that is a JSON object; lines are looked at from the end."""
    reach = 64 * 2**10
    with path.open("rb") as file:
        while True:
            start = max(0, size - reach)
            file.seek(start)
            block = file.read(size - start)
            end = len(block)
            while (newline := block.rfind(b"\n", 0, end)) >= 0:
                before = block.rfind(b"\n", 0, newline)
                if before < 0 and start > 0:
                    break
                if _parsed(block[before + 1 : newline]) is not None:
                    return start + newline + 1
                end = newline
            if start == 0:
                return 0
            reach *= 8


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


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
            event = _parsed(line) if line.endswith(b"\n") else None
            if event is None:
                broken = number
            else:
                yield event
