"""Progress of long work: shown to people, and noted for whoever watches that work goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

Advance = Callable[[float], None]


class Progress(Protocol):
    """Shows work that takes long. Implementations: none, plain lines, a live bar.

    Each makes a `mark` of every task and every advance.
    """

    def task(
        self, label: str, total: float | None = None, unit: str = ""
    ) -> AbstractContextManager[Advance]:
        """Opens a piece of work of `total` units; the result is called with what was done since."""


class NoProgress:
    """Shows nothing."""

    @contextmanager
    def task(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Advance]:
        """See `Progress.task`."""
        mark(label)
        yield lambda amount: mark()


@dataclass(frozen=True, slots=True)
class Mark:
    """What a thread of this process has got done."""

    count: int = 0
    """Rises with everything that it gets done."""
    doing: str = ""
    """What it began last, in words."""
    watched: bool = False
    """Whether it is to go on without a pause until its work is done."""


_marks: dict[int, Mark] = {}
"""By thread. Each thread sets its own entry only, so no lock is needed."""


def mark(doing: str | None = None) -> None:
    """Notes that this thread has got something done and, if told, what it begins now.

    Cheap enough for every piece of work of a millisecond. Not for loops that only wait for others:
    a mark says that work goes on.
    """
    thread = threading.get_ident()
    before = _marks.get(thread, Mark())
    words = before.doing if doing is None else doing
    _marks[thread] = Mark(before.count + 1, words, before.watched)


@contextmanager
def watched(doing: str) -> Iterator[None]:
    """Around work that is to make marks until it is done, in whatever thread, such as a save."""
    thread = threading.get_ident()
    before = _marks.get(thread)
    count = before.count if before is not None else 0
    _marks[thread] = Mark(count + 1, doing, True)
    try:
        yield
    finally:
        if before is None:
            del _marks[thread]
        else:
            _marks[thread] = Mark(_marks[thread].count + 1, before.doing, before.watched)


def marks() -> dict[int, Mark]:
    """What each thread that ever made a mark has got done."""
    return dict(_marks)
