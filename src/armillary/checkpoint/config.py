"""The recipe's part about checkpoints. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from armillary.foundation.errors import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """When to save, and how much to keep."""

    every: int = 0
    """Steps between two checkpoints; 0 = only at the end."""
    keep_last: int = 2
    """Newest verified checkpoints kept; older ones are removed. At least 1."""
    asynchronous: bool = True
    """Write in the background from a copy in host memory, while training goes on."""

    def problems(self) -> list[Problem]:
        """What is wrong with the values."""
        found = []
        if self.every < 0:
            found.append(
                Problem(
                    f"checkpoint.every = {self.every}", "0 or more steps", "--checkpoint.every 0"
                )
            )
        if self.keep_last < 1:
            found.append(
                Problem(
                    f"checkpoint.keep_last = {self.keep_last}",
                    "1 or more checkpoints",
                    "--checkpoint.keep-last 1",
                )
            )
        return found
