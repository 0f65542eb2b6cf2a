"""The recipe's part about steps that would poison a run. Imports no torch.

A policy is a component: it says how many bad steps in a row are passed over, and what becomes of
one that was found. What it can do is what a `BadStep` offers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from armillary.foundation.component import Component, component
from armillary.foundation.errors import Problem


class BadStep(Protocol):
    """A step that was found to be bad, as a policy sees it; its update has changed nothing.

    All ranks have one and treat it alike.
    """

    @property
    def in_a_row(self) -> int:
        """Bad steps up to this one, without a healthy one between them; at least 1."""

    @property
    def rewinds(self) -> int:
        """How often the run has gone back so far."""

    def stop(self, why: str = "") -> NoReturn:
        """Saves the state before the step and ends the run with an error."""

    def skip(self) -> None:
        """Goes on; the step counts, its update does not."""

    def rewind(self, *, steps_before: int) -> NoReturn:
        """Goes back to the newest checkpoint, and will not read the step's samples again."""


class GuardPolicy(Component, ABC):
    """What becomes of a step whose loss or gradient norm is bad."""

    __slots__ = ()

    @property
    def tolerated(self) -> int:
        """Bad steps in a row after which the run may still go on from where it stands.

        Beyond them nothing changes any more, and the policy has to stop or to go back; before, it
        can do neither, as steps that came after the bad one may have counted.
        """
        return 0

    @property
    def needs_checkpoints(self) -> bool:
        """Whether it is of no use in a run that saves at its end only."""
        return False

    def problems(self) -> list[Problem]:
        """What is wrong with the values."""
        return []

    @abstractmethod
    def react(self, bad: BadStep) -> None:
        """Called on every rank once the step was found."""


@component("stop")
@dataclass(frozen=True, kw_only=True, slots=True)
class Stop(GuardPolicy):
    """Save the state before the bad step, and end with code 1."""

    def react(self, bad: BadStep) -> None:
        """See `GuardPolicy.react`."""
        bad.stop()


@component("skip")
@dataclass(frozen=True, kw_only=True, slots=True)
class Skip(GuardPolicy):
    """Leave out the update of a bad step, and go on; stop when too many come in a row."""

    max_in_a_row: int = 10
    """Bad steps in a row that are left out; one more ends the run. At least 1."""

    @property
    def tolerated(self) -> int:
        """See `GuardPolicy.tolerated`."""
        return self.max_in_a_row

    def problems(self) -> list[Problem]:
        """See `GuardPolicy.problems`."""
        return _at_least(1, "guard.policy.max_in_a_row", self.max_in_a_row)

    def react(self, bad: BadStep) -> None:
        """See `GuardPolicy.react`."""
        if bad.in_a_row > self.max_in_a_row:
            bad.stop(
                f"it is the last of {bad.in_a_row} in a row, and the policy is to skip up"
                f" to {self.max_in_a_row}"
            )
        bad.skip()


@component("rewind")
@dataclass(frozen=True, kw_only=True, slots=True)
class Rewind(GuardPolicy):
    """Go back to the newest checkpoint, jump over the samples of the bad step, and go on.

    (Chowdhery et al. 2022, PaLM, arXiv 2204.02311, section 5.1: restart about 100 steps before the
    spike and skip 200 to 500 batches.)
    """

    max_rewinds: int = 3
    """How often a run goes back; one more bad step ends it. At least 1."""
    skip_steps_before: int = 0
    """Steps before the bad one whose samples are jumped over as well, as far as they come after
    the checkpoint."""

    @property
    def needs_checkpoints(self) -> bool:
        """See `GuardPolicy.needs_checkpoints`."""
        return True

    def problems(self) -> list[Problem]:
        """See `GuardPolicy.problems`."""
        return [
            *_at_least(1, "guard.policy.max_rewinds", self.max_rewinds),
            *_at_least(0, "guard.policy.skip_steps_before", self.skip_steps_before),
        ]

    def react(self, bad: BadStep) -> None:
        """See `GuardPolicy.react`."""
        if bad.rewinds >= self.max_rewinds:
            bad.stop(f"the run has gone back {bad.rewinds} times, which is all it may")
        bad.rewind(steps_before=self.skip_steps_before)


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """Keeps steps from poisoning the run whose loss or gradient norm is not finite, or spikes."""

    policy: GuardPolicy = field(default_factory=Stop)
    """What becomes of a bad step."""
    spike_factor: float = 0.0
    """How many robust standard deviations above the median of recent steps a loss or a gradient
    norm is bad; 0: only values that are not finite are. 10 or so leaves noise alone."""
    spike_window: int = 128
    """Healthy steps that the median is of; nothing is a spike before so many were taken."""

    def problems(self) -> list[Problem]:
        """What is wrong with the values."""
        found = self.policy.problems()
        if not self.spike_factor >= 0:  # nor is NaN
            message = f"guard.spike_factor = {self.spike_factor} is out of range"
            found.append(Problem(message, "0 (off) and up", "--guard.spike-factor 10"))
        return [*found, *_at_least(2, "guard.spike_window", self.spike_window)]


def _at_least(least: int, leaf: str, value: int) -> list[Problem]:
    if value >= least:
        return []
    option = leaf.replace("_", "-")
    return [Problem(f"{leaf} = {value} is out of range", f"{least} or more", f"--{option} {least}")]
