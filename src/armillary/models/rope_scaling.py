"""Stretching rotary positions to contexts longer than the one a model was first trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

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
    consistent: ClassVar[str] = (
        "factor from 1, 0 < low_frequency_factor < high_frequency_factor, original_max_seq_len > 0"
    )
    """What `is_consistent` asks for, in words."""

    @property
    def magnitude(self) -> float:
        """Factor of cosines and sines."""
        return 1.0

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        """Frequencies `[P/2]` in radians per token, of base theta -> the scaled ones."""
        turns = self.original_max_seq_len * frequencies / (2 * math.pi)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)

    def is_consistent(self) -> bool:
        """Whether the bounds are in order and the context grows."""
        ordered = 0 < self.low_frequency_factor < self.high_frequency_factor
        return ordered and self.factor >= 1 and self.original_max_seq_len > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnRopeScaling:
    """YaRN: slows low frequencies, blending by index of the pair, and sharpens the softmax.

    (Peng et al. 2023, arXiv 2309.00071, sections 3.2 to 3.4; DeepSeek-V2, arXiv 2405.04434,
    section 3.1.4, for the split of the sharpening between tables and scores.)
    """

    factor: float = 40.0
    """What low frequencies are divided by."""
    original_max_seq_len: int = 4096
    """Context before stretching, in tokens."""
    beta_fast: float = 32.0
    """Frequencies that turn more often than this in the original context stay as they are."""
    beta_slow: float = 1.0
    """Frequencies that turn fewer times than this in the original context are divided in full."""
    truncate: bool = True
    """Whether the bounds of the blend are moved outwards to whole pairs."""
    table_sharpening: float = 1.0
    """Coefficient a of m(a) = 0.1 a ln(factor) + 1, by which cosines and sines are multiplied."""
    score_sharpening: float = 0.0
    """Coefficient b of m(b), by whose square scores are multiplied and by which tables are divided:
    sharpens parts of a head that are not rotated too."""
    consistent: ClassVar[str] = "factor from 1, 0 < beta_slow < beta_fast, original_max_seq_len > 0"
    """What `is_consistent` asks for, in words."""

    @property
    def magnitude(self) -> float:
        """Factor of cosines and sines."""
        return self._m(self.table_sharpening) / self._m(self.score_sharpening)

    @property
    def score_factor(self) -> float:
        """Factor of the scores of attention, beside 1 / sqrt(P)."""
        return self._m(self.score_sharpening) ** 2

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        """Frequencies `[P/2]` in radians per token, of base theta -> the scaled ones."""
        import torch

        pairs = frequencies.shape[0]
        low, high = (self._pair(beta, pairs, theta) for beta in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        index = torch.arange(pairs, dtype=frequencies.dtype, device=frequencies.device)
        slowed = ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
        return frequencies * (1 - slowed + slowed / self.factor)

    def is_consistent(self) -> bool:
        """Whether the bounds are in order and the context grows."""
        ordered = 0 < self.beta_slow < self.beta_fast
        return ordered and self.factor >= 1 and self.original_max_seq_len > 0

    def _m(self, coefficient: float) -> float:
        return 0.1 * coefficient * math.log(self.factor) + 1

    def _pair(self, turns: float, pairs: int, theta: float) -> float:
        """Index, not rounded, of the pair that turns so often in the original context."""
        wavelengths = self.original_max_seq_len / (2 * math.pi * turns)
        return pairs * math.log(wavelengths) / math.log(theta)
