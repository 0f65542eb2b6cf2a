"""Multi-head latent attention: keys and values of all heads from one narrow vector per token."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from armillary.kernels import apply_rope
from armillary.models.layers.attention_core import AttentionCore
from armillary.models.layers.backends import Visible
from armillary.models.layers.cache import LayerCache
from armillary.models.layers.linear import Linear
from armillary.models.layers.norm import RMSNorm
from armillary.models.layers.rope import RotaryTables


class LatentAttention(nn.Module):
    """Attention whose keys and values are expanded from a latent of rank R_kv.

    A head's query and key are P = P_plain + P_rope wide: only the second part is rotated, and the
    key's is one for all heads. Values have a width of their own, P_v. With `query_rank`, queries
    are expanded from a latent too. (DeepSeek-V2, arXiv 2405.04434, section 2.1, eq. 9-19)

    The cache holds expanded keys and values. Pairs of the rotated part are its halves, as
    everywhere here; weights made for neighbouring pairs need their rows permuted.
    """

    tensor_region = True
    tensor_split: ClassVar[dict[str, str]] = {
        "query": "outputs",
        "key_value": "outputs",
        "output": "inputs",
    }

    def __init__(
        self,
        dim: int,
        *,
        n_heads: int,
        query_rank: int | None,
        key_value_rank: int,
        plain_head_dim: int,
        rope_head_dim: int,
        value_head_dim: int,
        norm_eps: float,
        std: float,
        output_std: float,
        backend: str = "auto",
        score_factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.head_widths = (plain_head_dim, rope_head_dim)
        self.value_head_dim = value_head_dim
        self.key_value_rank = key_value_rank
        head_dim = plain_head_dim + rope_head_dim
        self.query_latent: Linear | None = None
        self.query_norm: RMSNorm | None = None
        if query_rank is not None:
            self.query_latent = Linear(dim, query_rank, std=std)
            self.query_norm = RMSNorm(query_rank, eps=norm_eps)
        self.query = Linear(query_rank or dim, n_heads * head_dim, std=std)
        self.key_value_latent = Linear(dim, key_value_rank + rope_head_dim, std=std)
        self.key_value_norm = RMSNorm(key_value_rank, eps=norm_eps)
        self.key_value = Linear(
            key_value_rank, n_heads * (plain_head_dim + value_head_dim), std=std
        )
        self.output = Linear(n_heads * value_head_dim, dim, std=output_std)
        scale = score_factor * head_dim**-0.5
        self.core = AttentionCore(head_dim, backend=backend, scale=scale)

    def forward(
        self, x: Tensor, rope: RotaryTables, visible: Visible, cache: LayerCache | None = None
    ) -> Tensor:
        """x `[B, S, D]` -> `[B, S, D]`; with a cache, `visible` is a mask over all its columns."""
        latent = x
        if self.query_latent is not None and self.query_norm is not None:
            latent = self.query_norm(self.query_latent(x))
        plain, rotated = self._heads(self.query(latent), self.head_widths)
        query = torch.cat((plain, apply_rope(rotated, *rope)), dim=-1)  # [B, H, S, P]
        key, value = self._keys_and_values(x, rope)
        mixed = self.core(query, key, value, visible, cache)  # [B, H, S, Pv]
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out

    def _keys_and_values(self, x: Tensor, rope: RotaryTables) -> tuple[Tensor, Tensor]:
        plain_width, rope_width = self.head_widths
        both = self.key_value_latent(x)
        latent, shared = torch.split(both, [self.key_value_rank, rope_width], dim=-1)
        expanded = self.key_value(self.key_value_norm(latent))
        plain, value = self._heads(expanded, (plain_width, self.value_head_dim))
        shared = apply_rope(shared[:, None], *rope)  # [B, 1, S, P_rope]
        key = torch.cat((plain, shared.expand(-1, plain.shape[1], -1, -1)), dim=-1)
        return key, value

    def _heads(self, x: Tensor, widths: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """`[B, S, H (a + b)]` -> `[B, H, S, a]` and `[B, H, S, b]`."""
        by_head = x.view(*x.shape[:-1], -1, sum(widths)).transpose(1, 2)
        first, second = torch.split(by_head, list(widths), dim=-1)
        return first, second
