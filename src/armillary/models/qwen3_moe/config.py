"""Qwen3, mixtures of experts. (Yang et al. 2025, arXiv 2505.09388, table 2)"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from armillary.foundation.component import component
from armillary.models.moe import MoEDecoder
from armillary.models.routing import RouterConfig
from armillary.models.sizes import named


@component("qwen3-moe")
@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3MoE(MoEDecoder):
    """Qwen3's block with experts in every layer: softmax scores, normalised over the chosen."""

    norm_eps: float = 1e-6
    """Added to the mean square in norms."""
    rope_theta: float = 1_000_000.0
    """Base of the rotary wavelengths."""
    max_seq_len: int = 40_960
    """Longest row the model is meant for, in tokens."""
    router: RouterConfig = field(default_factory=lambda: RouterConfig(sequence_loss=1e-3))
    """How experts are chosen and kept evenly loaded."""

    @property
    def qk_norm(self) -> bool:
        """Queries and keys are normalised per head."""
        return True


class Qwen3MoESize(NamedTuple):
    """What differs between the sizes."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    n_experts: int
    n_active: int
    expert_dim: int

    def fields(self) -> dict[str, Any]:
        """The size as fields of a `Qwen3MoE`."""
        return self._asdict()


QWEN3_MOE_SIZES = {
    #                           D     L   H  K   P    F  dense  E   k  F
    "debug": Qwen3MoESize(128, 4, 8, 4, 16, 384, 8, 2, 64),
    "30B-A3B": Qwen3MoESize(2048, 48, 32, 4, 128, 6144, 128, 8, 768),
    "235B-A22B": Qwen3MoESize(4096, 94, 64, 4, 128, 12288, 128, 8, 1536),
}
"""Sizes as published (the model cards' config.json), and a debug size of our own."""

_VOCAB_SIZE = 151_936
_DEBUG_VOCAB_SIZE = 2048


def qwen3_moe(size: str) -> Qwen3MoE:
    """A published size: "30B-A3B", "235B-A22B", or "debug".

    Raises:
        UserError: no such size.
    """
    row = named("qwen3_moe", size, QWEN3_MOE_SIZES)
    vocabulary = _DEBUG_VOCAB_SIZE if size == "debug" else _VOCAB_SIZE
    return Qwen3MoE(**row.fields(), vocab_size=vocabulary)
