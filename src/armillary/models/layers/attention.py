"""Grouped-query attention over rotary positions."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from armillary.kernels import apply_rope
from armillary.models.layers.attention_core import AttentionCore
from armillary.models.layers.backends import Visible
from armillary.models.layers.cache import LayerCache
from armillary.models.layers.linear import Linear
from armillary.models.layers.norm import RMSNorm
from armillary.models.layers.rope import RotaryTables


class Attention(nn.Module):
    """H query heads share K key and value heads. (Ainslie et al. 2023, arXiv 2305.13245)

    With `head_norm_eps`, queries and keys are normalised per head before they are rotated
    (QK-norm; Qwen3, arXiv 2505.09388, section 2).
    """

    tensor_region = True
    tensor_split: ClassVar[dict[str, str]] = {
        "query": "outputs",
        "key": "outputs",
        "value": "outputs",
        "output": "inputs",
    }

    def __init__(
        self,
        dim: int,
        *,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        std: float,
        output_std: float,
        head_norm_eps: float | None = None,
        backend: str = "auto",
        bias: bool = False,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.query = Linear(dim, n_heads * head_dim, std=std, bias=bias)
        self.key = Linear(dim, n_kv_heads * head_dim, std=std, bias=bias)
        self.value = Linear(dim, n_kv_heads * head_dim, std=std, bias=bias)
        self.output = Linear(n_heads * head_dim, dim, std=output_std, bias=bias)
        self.core = AttentionCore(head_dim, backend=backend, window=window)
        self.query_norm: RMSNorm | None = None
        self.key_norm: RMSNorm | None = None
        if head_norm_eps is not None:
            self.query_norm = RMSNorm(head_dim, eps=head_norm_eps)
            self.key_norm = RMSNorm(head_dim, eps=head_norm_eps)

    def forward(
        self, x: Tensor, rope: RotaryTables, visible: Visible, cache: LayerCache | None = None
    ) -> Tensor:
        """x `[B, S, D]` -> `[B, S, D]`; with a cache, `visible` is a mask over all its columns."""
        query, key, value = (self._heads(projected) for projected in self.project(x))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query = apply_rope(query.transpose(1, 2), *rope)  # [B, H, S, P]
        key = apply_rope(key.transpose(1, 2), *rope)  # [B, K, S, P]
        mixed = self.core(query, key, value.transpose(1, 2), visible, cache)
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three projections of x `[B, S, D]`, each `[B, S, heads x P]`."""
        return self.query(x), self.key(x), self.value(x)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim)  # [B, S, heads, P]
