"""A file that lines are appended to, also when its disk fails for a while. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FULL = (errno.ENOSPC, errno.EDQUOT)
_PAUSE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _Line:
    data: bytes
    detail: bool
    """Whether it is of the kind that goes first when the room is used up."""


class LineFile:
    """Appends lines, each with one write. While that fails they wait in memory, in order.

    Each further line tries again. What waits is bounded: beyond it the oldest lines of detail go,
    then the oldest of all, and are counted in `dropped`.

    Args:
        path: opened, or made, at once; an incomplete last line is cut.
        room: most bytes that wait.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, room: int = 64 * 2**20) -> None:
        self.path = path
        self.failure: str | None = None
        """Why nothing can be written at the moment, in words."""
        self.dropped = 0
        """Lines given up so far; whoever has told of them sets it to 0."""
        self._room = room
        self._waiting: deque[_Line] = deque()
        self._waiting_bytes = 0
        self._of_first = 0
        """Bytes of the first waiting line that are in the file already."""
        self._descriptor: int | None = None
        self.cut = self._open(os.O_CREAT)
        """Bytes of the incomplete last line that was cut."""

    def append(self, line: bytes, *, detail: bool = False) -> bool:
        """Adds a line, which ends with a newline; returns whether all lines are in the file."""
        self._waiting.append(_Line(line, detail))
        self._waiting_bytes += len(line)
        written = self.write_out()
        while self._waiting_bytes > self._room and len(self._waiting) > 1:
            self._drop_one()
        return written

    def write_out(self) -> bool:
        """Writes what waits; returns whether nothing waits any more."""
        try:
            if self._descriptor is None:
                self._open()
            self._write_lines()
        except OSError as error:
            self.failure = error.strerror or str(error)
            if error.errno not in _FULL:  # a mount that comes back is to be opened anew
                self._let_go()
            return False
        self.failure = None
        return True

    def close(self, patience_seconds: float) -> int:
        """Makes the lines durable, insisting for so long; returns how many could not be written."""
        deadline = time.monotonic() + patience_seconds
        while not self._is_durable() and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
        self._let_go()
        return len(self._waiting)

    def _is_durable(self) -> bool:
        if not self.write_out():
            return False
        assert self._descriptor is not None
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            self.failure = error.strerror or str(error)
            return False
        return True

    def _open(self, create: int = 0) -> int:
        """Later on the file is there, unless its disk is not: no other is begun in its place."""
        cut = cut_torn_tail(self.path)
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | create, 0o644)
        self._of_first = 0  # what was there of a line has just been cut
        return cut

    def _let_go(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    def _write_lines(self) -> None:
        assert self._descriptor is not None
        while self._waiting:
            data = self._waiting[0].data
            while self._of_first < len(data):
                self._of_first += os.write(self._descriptor, data[self._of_first :])
            self._waiting.popleft()
            self._waiting_bytes -= len(data)
            self._of_first = 0

    def _drop_one(self) -> None:
        """Never the first line, of which a part may be in the file."""
        details = (at for at in range(1, len(self._waiting)) if self._waiting[at].detail)
        at = next(details, 1)
        self._waiting_bytes -= len(self._waiting[at].data)
        del self._waiting[at]
        self.dropped += 1


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
                if parsed_line(block[before + 1 : newline]) is not None:
                    return start + newline + 1
                end = newline
            if start == 0:
                return 0
            reach *= 8


def parsed_line(line: bytes) -> dict[str, Any] | None:
    """The JSON object that a line is; None if it is none."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None
