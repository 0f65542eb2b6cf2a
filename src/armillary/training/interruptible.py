"""Long work that can be stopped wherever it reports progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from armillary.foundation.progress import Advance, Progress


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
