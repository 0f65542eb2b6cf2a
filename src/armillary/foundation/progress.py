"""Progress of long work, without knowing how it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Advance = Callable[[float], None]


class Progress(Protocol):
    """Shows work that takes long. Implementations: none, plain lines, a live bar."""

    def task(
        self, label: str, total: float | None = None, unit: str = ""
    ) -> AbstractContextManager[Advance]:
        """Opens a piece of work of `total` units; the result is called with what was done since."""


class NoProgress:
    """Shows nothing."""

    @contextmanager
    def task(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Advance]:
        """See `Progress.task`."""
        yield lambda amount: None
