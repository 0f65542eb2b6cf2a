"""Qwen3, dense. (Yang et al. 2025, arXiv 2505.09388, table 1)"""

from __future__ import annotations

from dataclasses import dataclass

from armillary.foundation.component import component
from armillary.models.dense import DenseDecoder
from armillary.models.sizes import Size, named


@component("qwen3")
@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3(DenseDecoder):
    """Qwen3: Llama's block with queries and keys normalised per head."""

    norm_eps: float = 1e-6
    """Added to the mean square in norms."""
    rope_theta: float = 1_000_000.0
    """Base of the rotary wavelengths."""
    max_seq_len: int = 40_960
    """Longest row the model is meant for, in tokens."""

    @property
    def qk_norm(self) -> bool:
        """Queries and keys are normalised per head."""
        return True


QWEN3_SIZES = {
    #              D     L   H   K  P    F      tied
    "debug": Size(256, 8, 8, 4, 32, 768, True),
    "0.6B": Size(1024, 28, 16, 8, 128, 3072, True),
    "1.7B": Size(2048, 28, 16, 8, 128, 6144, True),
    "4B": Size(2560, 36, 32, 8, 128, 9728, True),
    "8B": Size(4096, 36, 32, 8, 128, 12288, False),
    "14B": Size(5120, 40, 40, 8, 128, 17408, False),
    "32B": Size(5120, 64, 64, 8, 128, 25600, False),
}
"""Sizes as published (the model cards' config.json), and a debug size of our own."""

_VOCAB_SIZE = 151_936
_DEBUG_VOCAB_SIZE = 2048


def qwen3(size: str) -> Qwen3:
    """A published dense size: "0.6B", "1.7B", "4B", "8B", "14B", "32B", or "debug".

    Raises:
        UserError: no such size.
    """
    row = named("qwen3", size, QWEN3_SIZES)
    return Qwen3(**row.fields(), vocab_size=_DEBUG_VOCAB_SIZE if size == "debug" else _VOCAB_SIZE)
