"""Eager oracles: each function the shortest true statement of its formula, whatever it costs.

Tests compare every kernel with its oracle here; read it to know what a kernel computes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Causal attention within documents: softmax(scale q kᵀ + mask) v with every score in memory.

    Query `i` of row `b` sees the keys `j` with `starts[b, i] <= j <= i`.
    """
    heads, length, head_dim = query.shape[1:]
    groups = heads // key.shape[1]
    scale = head_dim**-0.5 if scale is None else scale
    scores = query @ key.repeat_interleave(groups, dim=1).mT * scale  # [B, H, S, S]
    index = torch.arange(length, device=query.device)
    allowed = (index[None, :] <= index[:, None])[None]  # [1, S, S]
    if starts is not None:
        allowed = allowed & (index[None, None, :] >= starts[:, :, None])  # [B, S, S]
    scores = scores.masked_fill(~allowed[:, None], -torch.inf)
    return scores.softmax(dim=-1) @ value.repeat_interleave(groups, dim=1)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int = -100
) -> Tensor:
    """Sum over valid labels of -log softmax(hidden weightᵀ)[label], with all logits in memory."""
    logits = hidden @ weight.to(hidden.dtype).mT  # [T, V]
    return F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, silu(x) = x * sigmoid(x). (Shazeer 2020, arXiv 2002.05202, eq. 6)"""
    return gate * torch.sigmoid(gate) * up


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """swiglu(gate, up) weightᵀ."""
    return swiglu(gate, up) @ weight.mT


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dim. (arXiv 1910.07467, eq. 4)"""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x[i], x[i + P/2]) by the angle whose cosine and sine are given.

    x is `[B, H, S, P]`, cos and sin `[B, S, P/2]` or `[S, P/2]`. (Su et al. 2021, arXiv 2104.09864,
    eq. 34, with the halves paired, as Llama weights in the Hugging Face layout have them.)
    """
    if cos.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]  # [B, 1, S, P/2]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def partial_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    *,
    starts: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention to the keys j with starts[b, i] <= key_index[j] <= query_index[i], and its lse.

    lse = log sum_j exp(score_j); where nothing is seen, out is 0 and lse -inf.
    """
    groups = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.repeat_interleave(groups, dim=1).mT * scale  # [B, H, Sq, Sk]
    allowed = (key_index <= query_index[:, None])[None]  # [1, Sq, Sk]
    if starts is not None:
        allowed = allowed & (key_index >= starts[:, :, None])  # [B, Sq, Sk]
    blind = ~allowed.any(-1)[:, None]  # [B or 1, 1, Sq]
    scores = scores.masked_fill(~(allowed[:, None] | blind[..., None]), -torch.inf)
    out = scores.softmax(dim=-1) @ value.repeat_interleave(groups, dim=1)
    lse = scores.logsumexp(dim=-1)
    return out.masked_fill(blind[..., None], 0.0), lse.masked_fill(blind, -torch.inf)
