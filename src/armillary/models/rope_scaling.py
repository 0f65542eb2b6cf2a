"""Stretching rotary positions to contexts longer than the one a model was first trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama31RopeScaling:
    """Slows low frequencies, so that the longer context turns as far as the original one did.

    (Llama 3.1, Grattafiori et al. 2024, arXiv 2407.21783: frequencies are told apart by how often
    they turn within the original context, with a linear blend between the two bounds.)
    """

    factor: float = 8.0
    """What low frequencies are divided by."""
    low_frequency_factor: float = 1.0
    """Frequencies that turn fewer times than this in the original context are divided in full."""
    high_frequency_factor: float = 4.0
    """Frequencies that turn more often than this in the original context stay as they are."""
    original_max_seq_len: int = 8192
    """Context before stretching, in tokens."""

    def scale(self, frequencies: Tensor) -> Tensor:
        """Frequencies `[P/2]` in radians per token -> the scaled ones."""
        turns = self.original_max_seq_len * frequencies / (2 * math.pi)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)

    def is_consistent(self) -> bool:
        """Whether the bounds are in order and the context grows."""
        ordered = 0 < self.low_frequency_factor < self.high_frequency_factor
        return ordered and self.factor >= 1 and self.original_max_seq_len > 0
