"""The recipe's part about checkpoints. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from armillary.foundation.errors import Problem

_COUNTS = {"every": 0, "keep_last": 1, "keep_every": 0, "keep_best": 0, "ephemeral_every": 0}
"""Least value of each number of steps or checkpoints."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """When to save, where, and what to keep."""

    every: int = 0
    """Steps between two checkpoints; 0 = only at the end."""
    keep_last: int = 2
    """Newest verified checkpoints kept; older ones are removed. At least 1."""
    asynchronous: bool = True
    """Write in the background from a copy in host memory, while training goes on."""
    folder: str = ""
    """Where they go: empty = RUN/checkpoints, else an absolute path or s3://, gs://, az://."""
    keep_every: int = 0
    """Of every so many steps, the checkpoint stays for good; 0 = none does."""
    keep_best: int = 0
    """Checkpoints with the best scores that stay as well; 0 = scores do not matter."""
    best_metric: str = "validation"
    """Held-out set whose bits per byte are the score, or an evaluation task; lower is better."""
    ephemeral_every: int = 0
    """Steps between further checkpoints that go as soon as a newer one is durable; 0 = none."""
    retry_seconds: float = 600.0
    """Seconds that the end of a run insists on a save that fails."""
    partial: bool = False
    """Load what fits of another run's checkpoint, and say what did not, rather than refuse."""

    def problems(self) -> list[Problem]:
        """What is wrong with the values."""
        found = []
        for name, least in _COUNTS.items():
            if (value := getattr(self, name)) < least:
                unit = "checkpoints" if name in ("keep_last", "keep_best") else "steps"
                option = f"--checkpoint.{name.replace('_', '-')} {least}"
                found.append(
                    Problem(f"checkpoint.{name} = {value}", f"{least} or more {unit}", option)
                )
        if not (math.isfinite(self.retry_seconds) and self.retry_seconds >= 0):
            found.append(
                Problem(
                    f"checkpoint.retry_seconds = {self.retry_seconds}",
                    "0 or more seconds",
                    "--checkpoint.retry-seconds 600",
                )
            )
        if self.folder and "://" not in self.folder and not Path(self.folder).is_absolute():
            found.append(
                Problem(
                    f"checkpoint.folder = {self.folder!r} is relative",
                    "an absolute path, s3://bucket/folder, gs://bucket/folder or"
                    " az://container/folder",
                    f"--checkpoint.folder {Path(self.folder).expanduser().absolute()}",
                )
            )
        return found

    def is_due(self, step: int) -> bool:
        """Whether a save of this step is due, of whatever kind."""
        periods = (self.every, self.keep_every, self.ephemeral_every)
        return any(_divides(step, every) for every in periods)

    def kind_of(self, step: int) -> str:
        """What becomes of a save of this step; see `manifest.KINDS`."""
        if _divides(step, self.keep_every):
            return "permanent"
        is_regular = _divides(step, self.every) or not _divides(step, self.ephemeral_every)
        return "kept" if is_regular else "ephemeral"


def _divides(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
