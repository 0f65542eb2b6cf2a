"""Attention with biases, sinks and, in every other layer, a window."""

from __future__ import annotations

from typing import ClassVar

from armillary.models.layers.attention import Attention
from armillary.models.layers.attention_core import AttentionCore


class SinkAttention(Attention):
    """Grouped-query attention with a learned logit per head beside the keys.

    (GPT-OSS, arXiv 2508.10925, section 2.2)
    """

    tensor_split: ClassVar[dict[str, str]] = {**Attention.tensor_split, "core.sinks": "heads"}

    def __init__(
        self,
        dim: int,
        *,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        std: float,
        output_std: float,
        backend: str,
        window: int | None,
    ) -> None:
        super().__init__(
            dim,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            std=std,
            output_std=output_std,
            bias=True,
        )
        self.core = AttentionCore(head_dim, backend=backend, window=window, sink_heads=n_heads)
