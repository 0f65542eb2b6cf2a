"""Long work that can be stopped: where it reports progress, or by leaving it behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from armillary.foundation.progress import Advance, Progress

T = TypeVar("T")

_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 1.0
"""For work that is left behind to notice it by itself, and to clear up."""


class Interruptible:
    """A `Progress` that calls `check` at every advance; `check` may raise to end the work."""

    def __init__(self, progress: Progress, check: Callable[[], None]) -> None:
        self._progress, self._check = progress, check

    @contextmanager
    def task(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Advance]:
        """See `Progress.task`."""
        self._check()
        with self._progress.task(label, total, unit) as advance:

            def checked(amount: float) -> None:
                self._check()
                advance(amount)

            yield checked


def leavable(work: Callable[[], T], check: Callable[[], None]) -> T:
    """Runs `work` in a thread, so that one long call in it, as into a library, can be left.

    What it raises is raised here. When `check` raises, the work is given a moment to end, and is
    then left to end with the process; so it must survive that, as work does that writes atomically.
    """
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # whatever it is, it belongs to the caller
            failure.append(error)

    thread = threading.Thread(target=run, name="leavable", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            check()
            thread.join(_LOOK_SECONDS)
    except BaseException:
        thread.join(_GRACE_SECONDS)
        raise
    if failure:
        raise failure[0]
    return outcome[0]
