"""Passes signals on to the ranks that this process started. Loads no torch."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

from armillary.resilience.signals import heeded_signals

_INSISTENT = (signal.SIGINT, signal.SIGTERM)
"""What people send again when once was not enough; a shell may tell of a lost terminal twice."""
_TRIES_BEFORE_KILL = 3


class Receiver(Protocol):
    """A process that was started."""

    def send(self, number: int) -> None:
        """Passes on a signal, unless it has ended."""


class Forwarding:
    """Hears what asks a run to stop (`heeded_signals`) while entered; main thread only.

    The third SIGINT or SIGTERM kills.
    """

    def __init__(self) -> None:
        self.came = False
        """Whether any did, so that somebody wants the ranks to end."""
        self._ranks: Sequence[Receiver] = ()
        self._early: list[int] = []
        self._requests_to_stop = 0
        self._before: dict[int, Any] = {}

    @contextmanager
    def to(self, ranks: Sequence[Receiver]) -> Iterator[None]:
        """Passes them on to these, all of which are there: first those that came before."""
        self._ranks = ranks
        early, self._early = self._early, []
        for number in early:
            self._forward(number)
        try:
            yield
        finally:
            self._ranks = ()

    def __enter__(self) -> Forwarding:
        self._before = {number: signal.signal(number, self._forward) for number in heeded_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None = None) -> None:
        self.came = True
        if not self._ranks:
            self._early.append(number)
            return
        self._requests_to_stop += number in _INSISTENT
        kill = self._requests_to_stop >= _TRIES_BEFORE_KILL
        for each in self._ranks:
            each.send(signal.SIGKILL if kill else number)
