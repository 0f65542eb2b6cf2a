"""What the console knows of a run: a fold over its events."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_CURVE_POINTS = 1024
_WINDOW = 50


@dataclass(slots=True)
class RunState:
    """Latest values of a run. Changed only by `take`; nothing in it is guessed."""

    recipe: str = ""
    parameters: int | None = None
    world_size: int = 1
    total_steps: int | None = None
    checkpoint_every: int | None = None
    resumed_from: int | None = None
    peak_flops: float | None = None
    step: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    """Fields of the latest `step` event."""
    losses: list[float] = field(default_factory=list)
    """Loss curve, thinned to at most about a thousand points."""
    stride: int = 1
    """Steps per point of the curve."""
    bits_per_byte: float | None = None
    warning: str = ""
    """The latest; it would scroll away."""
    started: float | None = None
    times: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    """(step, time) of recent steps, for the time left."""
    stopped: str = ""

    def take(self, event: Mapping[str, Any]) -> None:
        """Adds one event."""
        kind = event["kind"]
        if kind == "start":
            self._take_start(event)
        elif kind == "step":
            self._take_step(event)
        elif kind == "validation":
            self.bits_per_byte = event["bits_per_byte"]
        elif kind == "stage":
            self.times.clear()  # the pace may be another from here on
        elif kind == "warning":
            self.warning = event["message"]
        elif kind == "stop":
            self.stopped = event["reason"]

    def seconds_left(self) -> float | None:
        """Steps to go at the pace of recent ones, validation and checkpoints included."""
        if self.total_steps is None or len(self.times) < 2:
            return None
        (first, begun), (last, now) = self.times[0], self.times[-1]
        if last <= first:
            return None
        return max(0, self.total_steps - last) * (now - begun) / (last - first)

    def data_share(self) -> float | None:
        """Share of the last step spent waiting for data."""
        seconds, data = self.values.get("step_seconds"), self.values.get("data_seconds")
        return data / seconds if seconds and data is not None else None

    def next_checkpoint(self) -> int | None:
        """Step of the next checkpoint."""
        if not self.checkpoint_every:
            return self.total_steps
        following = (self.step // self.checkpoint_every + 1) * self.checkpoint_every
        return following if self.total_steps is None else min(following, self.total_steps)

    def _take_start(self, event: Mapping[str, Any]) -> None:
        self.recipe = event.get("recipe") or ""
        self.parameters = event["parameters"]
        self.world_size = event["world_size"]
        self.total_steps = event.get("total_steps")
        self.checkpoint_every = event.get("checkpoint_every")
        self.peak_flops = event.get("peak_flops")
        self.resumed_from = event["resumed_from"]
        self.step = self.resumed_from or 0
        self.started = event["time"]
        self.times.clear()

    def _take_step(self, event: Mapping[str, Any]) -> None:
        self.step = event["step"]
        self.values = dict(event)
        self.times.append((event["step"], event["time"]))
        if event["loss"] is not None and event["step"] % self.stride == 0:
            self.losses.append(event["loss"])
            if len(self.losses) > _CURVE_POINTS:
                self.losses = self.losses[1::2]
                self.stride *= 2
