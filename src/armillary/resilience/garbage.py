"""When Python collects its garbage. Loads no torch.

Left to itself, each rank collects at a moment of its own, and at each of them all others wait.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Garbage:
    """Collections of all ranks at the same step.

    Args:
        every: steps between two of them; 0 leaves them to Python.
    """

    def __init__(self, every: int) -> None:
        self.seconds = 0.0
        """Spent on collections, those by Python itself among them."""
        self._every = every
        self._began: float | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around the steps: collections are measured and, if asked for, wait for `step_done`.

        What there is when it begins is there to stay, so that no collection looks at it again.
        """
        was_automatic = gc.isenabled()
        gc.callbacks.append(self._measure)
        if self._every:
            gc.collect()
            gc.freeze()
            gc.disable()
        try:
            yield
        finally:
            if self._every:
                gc.unfreeze()
                if was_automatic:
                    gc.enable()
            gc.callbacks.remove(self._measure)

    def step_done(self, step: int) -> None:
        """Collects if this step is one after which all ranks do."""
        if self._every and step % self._every == 0:
            gc.collect()

    def _measure(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        elif self._began is not None:
            self.seconds += time.perf_counter() - self._began
            self._began = None
