"""Rotary position embedding: the tables, computed from positions once per forward pass.

The tables are never stored: they follow from the positions, so a checkpoint does not carry them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.models.rope_scaling import Llama31RopeScaling, YarnRopeScaling


class RotaryTables(NamedTuple):
    """Cosines and sines `[B, S, P/2]` (or `[S, P/2]`, the same for every row), in fp32.

    Queries and keys in bf16 are multiplied in fp32 and rounded once: a table in bf16 would lose
    neighbouring positions of a long context.
    """

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Angles position * theta^(-2i/P), i from 0 to P/2. (arXiv 2104.09864, section 3.2.2)"""

    head_dim: int
    """P, even."""
    theta: float
    """Base of the wavelengths."""
    scaling: Llama31RopeScaling | YarnRopeScaling | None = None
    """Stretching to a longer context."""

    def frequencies(self, device: torch.device) -> Tensor:
        """`[P/2]`, radians per token."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device)
        frequencies = self.theta ** -(exponents / self.head_dim)
        return self.scaling.scale(frequencies, self.theta) if self.scaling else frequencies

    def tables(self, positions: Tensor) -> RotaryTables:
        """Positions `[B, S]` or `[S]` -> tables with a dim of P/2 more."""
        angles = positions[..., None].float() * self.frequencies(positions.device)
        cos, sin = angles.cos(), angles.sin()
        if self.scaling is not None and self.scaling.magnitude != 1.0:
            cos, sin = cos * self.scaling.magnitude, sin * self.scaling.magnitude
        return RotaryTables(cos, sin)
