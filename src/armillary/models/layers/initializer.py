"""How a parameter starts, as data. Whoever owns the mesh draws the numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Initializer:
    """Distribution of one parameter's first value, drawn by (seed, name, global index)."""

    kind: Literal["normal", "truncated_normal", "ones", "zeros"]
    """Family of the distribution."""
    std: float = 0.0
    """Standard deviation of the normal before it is cut."""
    cut: float = 3.0
    """Where a truncated normal is cut, in standard deviations."""


ONES = Initializer(kind="ones")
ZEROS = Initializer(kind="zeros")


def truncated_normal(std: float) -> Initializer:
    """A normal around 0, cut at three standard deviations."""
    return Initializer(kind="truncated_normal", std=std)
