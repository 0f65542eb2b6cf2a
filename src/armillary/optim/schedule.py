"""Learning-rate schedules as pure functions of the step: there is no state to lose.

`config.build(total_steps)` returns `factor(step)` for 0 <= step < total_steps, to be multiplied
with each group's own rate. One convention holds for all of them, with W steps of warm-up and D of
decay in a run of S:

- warm-up: step s < W has (s + 1) / W, so the first step learns and step W - 1 has the full rate;
- decay: step s >= S - D has the decay's value at (s - (S - D)) / D, so the full rate is reached
  even without warm-up, and the last step is still above the floor, which stands at step S, the
  first that is not run. No step is spent at rate 0;
- W = 0 and D = 0 are no special cases.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from armillary.foundation.component import Component, component
from armillary.foundation.errors import Problem, UserError

Schedule = Callable[[int], float]


class ScheduleConfig(Component, ABC):
    """How the learning rate moves over the run."""

    __slots__ = ()

    @abstractmethod
    def problems(self, total_steps: int) -> list[Problem]:
        """What is wrong with the values, for a run of `total_steps`."""

    def build(self, total_steps: int) -> Schedule:
        """factor(step), defined for 0 <= step < total_steps.

        Raises:
            UserError: a value is out of range, or warm-up and decay overlap.
        """
        problems = self.problems(total_steps)
        if problems:
            raise UserError(problems)
        factor = self.factor(total_steps)

        def checked(step: int) -> float:
            assert 0 <= step < total_steps, f"step {step} is outside the run of {total_steps}"
            return factor(step)

        return checked

    @abstractmethod
    def factor(self, total_steps: int) -> Schedule:
        """The schedule for values that have no problems."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _WithWarmup(ScheduleConfig):
    """What all schedules share: a linear rise, then whatever comes, not below the floor."""

    warmup_steps: int | None = None
    """Steps of linear rise to the full rate; none: warmup_fraction of the run."""
    warmup_fraction: float = 0.02
    """Share of the run spent rising, in [0, 1]; only where warmup_steps is none."""

    def warmup(self, total_steps: int) -> int:
        """Steps of warm-up in a run of `total_steps`."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return int(self.warmup_fraction * total_steps)

    def problems(self, total_steps: int) -> list[Problem]:
        """See `ScheduleConfig.problems`."""
        problems = []
        if total_steps < 1:
            problems.append(Problem(f"a schedule over {total_steps} steps", "at least 1 step"))
        for name in ("warmup_fraction", "decay_fraction", "floor"):
            value = getattr(self, name, 0.0)
            if not 0.0 <= value <= 1.0:
                problems.append(Problem(f"schedule.{name} = {value}", "a number in [0, 1]"))
        if self.warmup_steps is not None and self.warmup_steps < 0:
            problems.append(Problem(f"schedule.warmup_steps = {self.warmup_steps}", "0 or more"))
        return problems or self._overlap(total_steps)

    def decay(self, total_steps: int) -> int:
        """Steps of decay, the last of the run."""
        return total_steps - self.warmup(total_steps)

    def factor(self, total_steps: int) -> Schedule:
        """See `ScheduleConfig.factor`."""
        warmup, decay = self.warmup(total_steps), self.decay(total_steps)
        begin = total_steps - decay  # the first step of the decay

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            if step < begin:
                return 1.0
            return self._fall((step - begin) / decay)

        return factor

    def _fall(self, progress: float) -> float:
        """The factor when `progress` in [0, 1) of the decay has passed."""
        return 1.0

    def _overlap(self, total_steps: int) -> list[Problem]:
        warmup, decay = self.warmup(total_steps), max(0, self.decay(total_steps))
        if warmup + decay <= total_steps:
            return []
        falls = f" and {decay} of decay" if decay else ""
        return [
            Problem(
                f"schedule: {warmup} steps of warm-up{falls} do not fit "
                f"in budget.steps = {total_steps}",
                f"at most {total_steps - decay} steps of warm-up",
                f"--schedule.warmup-steps {max(0, (total_steps - decay) // 10)}, or a longer run",
            )
        ]


@component("constant")
@dataclass(frozen=True, kw_only=True, slots=True)
class Constant(_WithWarmup):
    """The full rate, after an optional warm-up."""

    warmup_fraction: float = 0.0
    """Share of the run spent rising, in [0, 1]; only where warmup_steps is none."""

    def decay(self, total_steps: int) -> int:
        """None."""
        return 0


@component("linear")
@dataclass(frozen=True, kw_only=True, slots=True)
class Linear(_WithWarmup):
    """A rise, then a straight fall over the rest of the run.

    (To zero: Bergsma et al. 2025, "Straight to zero", arXiv 2502.15938.)
    """

    floor: float = 0.0
    """Factor at the end of the run, just after the last step, relative to the full rate."""

    def _fall(self, progress: float) -> float:
        return self.floor + (1.0 - self.floor) * (1.0 - progress)


@component("cosine")
@dataclass(frozen=True, kw_only=True, slots=True)
class Cosine(_WithWarmup):
    """A rise, then half a cosine wave down over the rest of the run.

    (Loshchilov & Hutter 2017, "SGDR", arXiv 1608.03983, eq. 5, without restarts.)
    """

    floor: float = 0.1
    """Factor at the end of the run, just after the last step, relative to the full rate."""

    def _fall(self, progress: float) -> float:
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


@component("inverse-sqrt")
@dataclass(frozen=True, kw_only=True, slots=True)
class InverseSqrt(_WithWarmup):
    """A rise of W steps, then sqrt(W / (step + 1)); it does not depend on the length of the run.

    (Vaswani et al. 2017, "Attention is all you need", arXiv 1706.03762, eq. 3, relative to its
    peak.)
    """

    floor: float = 0.0
    """The least factor, relative to the full rate."""

    def factor(self, total_steps: int) -> Schedule:
        """See `ScheduleConfig.factor`. Without warm-up W counts as 1."""
        warmup = max(1, self.warmup(total_steps))

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            return max(self.floor, math.sqrt(warmup / (step + 1)))

        return factor


@component("warmup-stable-decay")
@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupStableDecay(_WithWarmup):
    """A rise, the full rate, then a straight fall at the end of the run.

    (Hu et al. 2024, "MiniCPM", arXiv 2404.06395, eq. 1; the linear fall: Hägele et al. 2024,
    arXiv 2405.18392.)
    """

    decay_fraction: float = 0.2
    """Share of the whole run spent falling, in [0, 1]."""
    floor: float = 0.0
    """Factor at the end of the run, just after the last step, relative to the full rate."""

    def decay(self, total_steps: int) -> int:
        """The last decay_fraction of the run."""
        return int(self.decay_fraction * total_steps)

    def _fall(self, progress: float) -> float:
        return self.floor + (1.0 - self.floor) * (1.0 - progress)
