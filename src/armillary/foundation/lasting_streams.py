"""Standard output and error that outlive their terminal."""

from __future__ import annotations

import errno
import io
import sys
from typing import Any


def outlive_terminal() -> None:
    """Has both swallow what can no longer be shown once the terminal is lost.

    Whoever lost the connection wants the run saved, and a message must not end that.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream.isatty():
            raw = _Lasting(stream.fileno(), "w", closefd=False)
            lasting = io.TextIOWrapper(
                io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=True
            )
            setattr(sys, name, lasting)


class _Lasting(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return memoryview(data).nbytes
