"""How long a run may stand still, and what is seen to between steps. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from armillary.foundation.errors import Problem

_UNWATCHED_GROUP_SECONDS = 600.0
_ABOVE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Watchdog:
    """What happens when ranks stop making progress, and what is seen to between steps."""

    enabled: bool = True
    """Whether a run that stands still is ended, with all stacks on disk and who is missing told."""
    first_step_seconds: float = 1800.0
    """How long no rank may make progress before the first step is done and after the last, in
    seconds; it holds the first compilation."""
    step_seconds: float = 300.0
    """The same between the first step and the last: one phase of a step, one piece of a save."""
    grace_seconds: float = 10.0
    """How long the others have to say what they wait for, in seconds."""
    garbage_collection: int = 50
    """Steps between two collections of Python's garbage, by all ranks at once; 0: whenever Python
    likes, on each rank at another time."""
    ranks_every: int = 50
    """Steps between two `ranks` events, which say who is slow; 0: none."""

    @property
    def group_seconds(self) -> float:
        """How long a collective may wait before the process group itself gives up."""
        if not self.enabled:
            return _UNWATCHED_GROUP_SECONDS
        longest = max(self.first_step_seconds, self.step_seconds)
        return longest + 2 * self.grace_seconds + _ABOVE_SECONDS

    def problems(self) -> list[Problem]:
        """Everything that is wrong with these values."""
        found = []
        for name in ("first_step_seconds", "step_seconds", "grace_seconds"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                default = getattr(Watchdog(), name)
                found.append(
                    Problem(
                        f"watchdog.{name} = {value} is out of range",
                        "above 0, and finite (--watchdog.enabled false watches nothing)",
                        f"--watchdog.{name.replace('_', '-')} {default:g}",
                    )
                )
        for name in ("garbage_collection", "ranks_every"):
            if getattr(self, name) < 0:
                found.append(
                    Problem(
                        f"watchdog.{name} = {getattr(self, name)} is out of range",
                        "0 or more",
                        f"--watchdog.{name.replace('_', '-')} {getattr(Watchdog(), name)}",
                    )
                )
        return found
