"""Causal attention within documents, in blocks of queries, never holding all scores.

The backward pass computes the scores again from query and key, so nothing but the three inputs is
kept. (Dao et al. 2022, arXiv 2205.14135, is the idea; here a block of queries meets all its keys at
once, so that the softmax and its derivative are the library's own fused rows and need no running
maximum.) Scores, softmax and sums are fp32 whatever the inputs are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_BLOCK = 128
_SCRATCH_ELEMENTS = 1 << 20
"""Scores that one step of the loop holds at a time; 4 MiB in fp32, to stay in cache."""


def blocked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of every query to the keys of its own document up to itself.

    What other documents hold changes nothing, not even the last bit. Blocks of keys before the
    first document of a block of queries are never touched. The result lies in memory as
    `[B, S, H, P]`, so that the projection after it needs no copy.

    Args:
        query: `[B, H, S, P]`.
        key: `[B, K, S, P]`, with H a multiple of K.
        value: `[B, K, S, P]`.
        starts: `[B, S]` int64, index in the row of the first token of the query's document;
            None: every row is one document.
        scale: factor of the scores; None: 1 / sqrt(P).
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = _attention(query, key, value, starts, scale)
    return out


@dataclass(frozen=True, slots=True)
class _Tile:
    """A block of queries and the keys that any of them sees, for some rows."""

    begin: int
    end: int
    first_key: int
    mask: Tensor
    """Additive, `[rows or 1, 1, queries, keys]`, for the last `mask.shape[-1]` keys of the tile."""

    @property
    def queries(self) -> slice:
        return slice(self.begin, self.end)

    @property
    def keys(self) -> slice:
        return slice(self.first_key, self.end)

    def weights(self, query: Tensor, scaled_key: Tensor, rows: int) -> Tensor:
        """Softmax of the scores, `[rows x K, groups x queries, keys]`; exactly 0 where hidden."""
        scores = torch.bmm(query, scaled_key[:, self.keys].mT)
        queries, keys = self.mask.shape[-2:]
        by_row = scores.view(rows, -1, queries, scores.shape[-1])
        by_row[..., scores.shape[-1] - keys :] += self.mask
        return scores.softmax(dim=-1)


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _groups(
    query: Tensor, key: Tensor, starts: Tensor | None
) -> Iterator[tuple[slice, slice, list[_Tile]]]:
    """Cuts the work into (rows, kv heads, tiles) so that the scores of one tile fit the scratch."""
    batch, heads, length, _ = query.shape
    kv_heads = key.shape[1]
    per_kv_head = heads // kv_heads * min(_BLOCK, length) * length
    kv_step = max(1, min(kv_heads, _SCRATCH_ELEMENTS // per_kv_head))
    row_step = max(1, min(batch, _SCRATCH_ELEMENTS // (per_kv_head * kv_heads)))
    triangle = torch.full(
        (_BLOCK, _BLOCK), -torch.inf, dtype=_exact(query.dtype), device=key.device
    )
    triangle.triu_(1)
    tiles = _tiles(length, triangle, None)
    for row in range(0, batch, row_step):
        rows = slice(row, min(row + row_step, batch))
        if starts is not None:
            tiles = _tiles(length, triangle, starts[rows])
        for head in range(0, kv_heads, kv_step):
            yield rows, slice(head, min(head + kv_step, kv_heads)), tiles


def _tiles(length: int, triangle: Tensor, starts: Tensor | None) -> list[_Tile]:
    tiles = []
    for begin in range(0, length, _BLOCK):
        end = min(begin + _BLOCK, length)
        causal = triangle[None, None, : end - begin, : end - begin]
        if starts is None:
            tiles.append(_Tile(begin, end, 0, causal))
            continue
        block = starts[:, begin:end]
        lowest, highest = int(block.min()), int(block.max())
        first = lowest // _BLOCK * _BLOCK  # few distinct shapes: a GEMM library plans once for each
        if highest == first:
            tiles.append(_Tile(begin, end, first, causal))
            continue
        before = torch.arange(first, end, device=starts.device) < block[:, None, :, None]
        mask = triangle.new_zeros(before.shape).masked_fill_(before, -torch.inf)
        mask[..., begin - first :] += causal
        tiles.append(_Tile(begin, end, first, mask))
    return tiles


def _flat(x: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """`[rows, heads, n, P]` -> contiguous `[rows x kv_heads, groups x n, P]`, in one pass."""
    x = x.to(dtype, memory_format=torch.contiguous_format).contiguous()
    return x.view(x.shape[0] * kv_heads, -1, x.shape[-1])


def _empty(like: Tensor) -> Tensor:
    """Uninitialised `[B, H, S, P]` that lies in memory as `[B, S, H, P]`."""
    batch, heads, length, head_dim = like.shape
    return like.new_empty(batch, length, heads, head_dim).transpose(1, 2)


@torch.library.custom_op("armillary::blocked_attention", mutates_args=())
def _attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor | None, scale: float
) -> Tensor:
    low, exact = query.dtype, _exact(query.dtype)
    groups = query.shape[1] // key.shape[1]
    out = _empty(query)
    for rows, kv, tiles in _groups(query, key, starts):
        kv_heads, heads = kv.stop - kv.start, slice(kv.start * groups, kv.stop * groups)
        q, mixed = query[rows, heads], out[rows, heads]
        k = _flat(key[rows, kv], kv_heads, exact) * scale
        v = _flat(value[rows, kv], kv_heads, low)
        for tile in tiles:
            queries = _flat(q[:, :, tile.queries], kv_heads, exact)
            weights = tile.weights(queries, k, q.shape[0]).to(low)
            block = mixed[:, :, tile.queries]
            block.copy_(torch.bmm(weights, v[:, tile.keys]).view(block.shape))
    return out


@_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, starts: Tensor | None, scale: float) -> Tensor:
    return _empty(query)


@torch.library.custom_op("armillary::blocked_attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, starts: Tensor | None, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    low, exact = query.dtype, _exact(query.dtype)
    groups = query.shape[1] // key.shape[1]
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    for rows, kv, tiles in _groups(query, key, starts):
        kv_heads, heads = kv.stop - kv.start, slice(kv.start * groups, kv.stop * groups)
        q, g, grad_q = query[rows, heads], grad[rows, heads], grads[0][rows, heads]
        k_low, v = (_flat(x[rows, kv], kv_heads, low) for x in (key, value))
        k = k_low.to(exact) * scale
        grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(k)
        for tile in tiles:
            queries, keys = _flat(q[:, :, tile.queries], kv_heads, low), tile.keys
            block_grad = _flat(g[:, :, tile.queries], kv_heads, low)
            weights = tile.weights(queries.to(exact), k, q.shape[0])
            grad_v[:, keys] += torch.bmm(weights.to(low).mT, block_grad)
            grad_weights = torch.bmm(block_grad, v[:, keys].mT).to(exact)
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, exact).to(low)
            grad_k[:, keys] += torch.bmm(grad_scores.mT, queries)
            block = grad_q[:, :, tile.queries]
            torch.mul(torch.bmm(grad_scores, k_low[:, keys]).view(block.shape), scale, out=block)
        shape = (q.shape[0], kv_heads, *k.shape[1:])
        torch.mul(grad_k.view(shape), scale, out=grads[1][rows, kv])
        grads[2][rows, kv] = grad_v.view(shape)
    return grads


@_attention_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, starts: Tensor | None, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, starts, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, starts)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, starts = ctx.saved_tensors
    return *_attention_backward(grad, query, key, value, starts, scale=ctx.scale), None, None


_attention.register_autograd(_backward, setup_context=_setup)
