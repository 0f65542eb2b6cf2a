"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from armillary.foundation.progress import mark

PHASES = ("data", "forward_backward", "optimizer", "checkpoint")
_ON_DEVICE = ("forward_backward", "optimizer")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeconds:
    """Seconds of one step by phase; `other` is what no phase claims.

    On a CPU the parts sum to `step`. On a GPU they may exceed it: the host can wait for data while
    the device still computes.
    """

    step: float
    data: float
    forward_backward: float
    optimizer: float
    checkpoint: float
    other: float

    def fields(self) -> dict[str, float]:
        """As fields of a `step` event."""
        return {
            "step_seconds": self.step,
            "data_seconds": self.data,
            "forward_backward_seconds": self.forward_backward,
            "optimizer_seconds": self.optimizer,
            "checkpoint_seconds": self.checkpoint,
            "other_seconds": self.other,
        }


class StepEnded:
    """A step that has ended for the host, while the device may still be busy with it."""

    def __init__(
        self,
        step: float,
        by_phase: dict[str, float],
        events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]],
    ) -> None:
        self._step, self._by_phase, self._events = step, by_phase, events

    def seconds(self) -> StepSeconds:
        """Its seconds by phase; waits until the device has done all of it. To be called once."""
        if self._events:
            self._events[-1][2].synchronize()
            for name, first, last in self._events:
                self._by_phase[name] += first.elapsed_time(last) / 1e3
        other = max(0.0, self._step - sum(self._by_phase.values()))
        return StepSeconds(step=self._step, other=other, **self._by_phase)


class StepTimer:
    """Splits the wall time between two calls of `end` into phases.

    Host clock: a phase lasts from entering to leaving it. On a GPU the host runs ahead of the
    device, so forward-backward and optimizer are timed by events in the device's stream instead;
    `data` and `checkpoint` are what the host waited. Neither a phase nor `end` synchronises;
    `StepEnded.seconds` waits for the last recorded event, once the host has read that step's loss.
    """

    def __init__(
        self, device: torch.device | None = None, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._device = device if device is not None and device.type == "cuda" else None
        self._active: str | None = None
        self._start = clock()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Claims the time inside for one of `PHASES`; any number of times a step, not nested."""
        assert name in PHASES, f"no such phase: {name}"
        assert self._active is None, f"phase {name} inside phase {self._active}"
        self._active = name
        mark(name)
        begun = self._clock()
        on_device = self._device is not None and name in _ON_DEVICE
        first = self._record() if on_device else None
        try:
            yield
        finally:
            if first is not None:
                self._events.append((name, first, self._record()))
            else:
                self._seconds[name] += self._clock() - begun
            self._active = None
            mark(f"after {name}")

    def restart(self) -> None:
        """Forgets what was measured and starts a step now (before the first, after validation)."""
        self._start = self._clock()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._events.clear()

    def end(self) -> StepEnded:
        """Ends the step, without waiting for the device; the next step starts now."""
        ended = StepEnded(self._clock() - self._start, self._seconds, list(self._events))
        self.restart()
        return ended

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
