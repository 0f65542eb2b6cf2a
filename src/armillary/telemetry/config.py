"""What a run reports, and where. Imports no torch."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from armillary.foundation.errors import Problem, missing_extra, nearest

CONSOLE_MODES = ("auto", "live", "plain", "off")
GRADIENT_NORMS = ("none", "groups", "parameters")
WANDB_MODES = ("online", "offline", "disabled")


@dataclass(frozen=True, kw_only=True, slots=True)
class Telemetry:
    """What a run reports beside `events.jsonl`, which is always written."""

    console: str = "auto"
    """Standard error: auto (live on a terminal, else plain), live, plain or off."""
    log_every: int = 1
    """Steps between two step records on the plain console and in the sinks; events have all."""
    tensorboard: bool = False
    """Whether scalars are also written to RUN/tensorboard."""
    wandb: bool = False
    """Whether scalars are also sent to Weights & Biases."""
    wandb_project: str = "armillary"
    """Project name there."""
    wandb_mode: str = "online"
    """online, offline (written to RUN/wandb, sent later with `wandb sync`) or disabled."""
    samples: bool = False
    """Whether `step` events list the ids of the global step's samples, in order."""
    gradient_norms: str = "none"
    """Norms before clipping in `step` events, as `gradient_norms`: none, groups (embedding,
    attention, feed_forward, experts, router, norms, head, other) or parameters (each one)."""
    profile_from: int = 0
    """First step to profile, counting from 1; 0 profiles nothing."""
    profile_steps: int = 3
    """Number of steps to profile."""
    profile_all_ranks: bool = False
    """Whether every rank writes a trace, not only rank 0."""
    memory_snapshot: bool = False
    """Whether the GPU allocator's history over the profiled steps is written too."""
    peak_flops: float | None = None
    """Peak FLOP/s of one device, for MFU; None looks the device up in the table of peaks."""

    def problems(self) -> list[Problem]:
        """Everything that is wrong with these values."""
        found = [
            *_choice("telemetry.console", self.console, CONSOLE_MODES),
            *_choice("telemetry.wandb_mode", self.wandb_mode, WANDB_MODES),
            *_choice("telemetry.gradient_norms", self.gradient_norms, GRADIENT_NORMS),
            *_at_least("telemetry.log_every", self.log_every, 1),
            *_at_least("telemetry.profile_from", self.profile_from, 0),
            *_at_least("telemetry.profile_steps", self.profile_steps, 1),
        ]
        if self.peak_flops is not None and not self.peak_flops > 0:
            found.append(
                Problem(
                    f"telemetry.peak_flops = {self.peak_flops} is not positive",
                    allowed="the peak FLOP/s of one device, e.g. 989e12",
                    fix="leave it out to use the table of peaks",
                )
            )
        if self.memory_snapshot and not self.profile_from:
            found.append(
                Problem(
                    "telemetry.memory_snapshot = true, but telemetry.profile_from = 0: no profile",
                    fix="--telemetry.profile-from 10",
                )
            )
        for wanted, module, what in (
            (self.tensorboard, "tensorboard", "telemetry.tensorboard = true"),
            (self.wandb, "wandb", "telemetry.wandb = true"),
        ):
            if wanted and importlib.util.find_spec(module) is None:
                found.extend(missing_extra(module, what).problems)
        return found


def _choice(field: str, value: str, allowed: tuple[str, ...]) -> list[Problem]:
    if value in allowed:
        return []
    flag = "--" + field.replace("_", "-")
    return [
        Problem(
            f"{field} = {value!r} is not a choice",
            allowed=", ".join(allowed),
            fix=f"{flag} {nearest(value, allowed) or allowed[0]}",
        )
    ]


def _at_least(field: str, value: int, least: int) -> list[Problem]:
    if value >= least:
        return []
    flag = "--" + field.replace("_", "-")
    return [
        Problem(
            f"{field} = {value} is too small", allowed=f"{least} or more", fix=f"{flag} {least}"
        )
    ]
