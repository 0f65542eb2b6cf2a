"""Attention of some of a row's queries to some of its keys, and the weight that the result carries.

A rank that holds part of a row sees part of the softmax. With the logarithm of its denominator
(lse) parts are merged exactly: out = sum_i exp(lse_i - lse) out_i, lse = log sum_i exp(lse_i).
(Milakov & Gimelshein 2018, arXiv 1805.02867; Liu et al. 2023, arXiv 2310.01889, for rings)

Blocks of queries meet all the keys that any of them sees, so that scores never exist whole; keys
before and after are not touched. Scores, softmax and sums are fp32, or fp64 for fp64 inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from armillary.kernels.attention_tiles import Part, flat, parts_of


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
    """Attention of the queries at some places of a row to the keys at some places of it.

    Query i sees key j if starts[b, i] <= key_index[j] <= query_index[i]. Gradients flow through
    both results. What a query does not see changes nothing, not even the last bit.

    Args:
        query: `[B, H, Sq, P]`.
        key: `[B, K, Sk, P]`, with H a multiple of K.
        value: `[B, K, Sk, Pv]`.
        query_index: `[Sq]` int64, index in the row of each query.
        key_index: `[Sk]` int64, ascending, index in the row of each key.
        starts: `[B, Sq]` int64, the first index that each query sees; None: 0.
        scale: factor of the scores; None: 1 / sqrt(P).

    Returns:
        out `[B, H, Sq, Pv]`, lying in memory as `[B, Sq, H, Pv]`, and lse `[B, H, Sq]` in the
        softmax's dtype. A query that sees nothing has out 0 and lse -inf.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out, lse = _partial(query, key, value, query_index, key_index, starts, scale)
    return out, lse


def attention_with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The attention `out` with a learned logit per head added to the softmax's denominator.

    out * exp(lse) / (exp(lse) + exp(sink)). (GPT-OSS, arXiv 2508.10925, section 2.2)

    Args:
        out: `[B, H, S, Pv]`.
        lse: `[B, H, S]`.
        sinks: `[H]`.
    """
    share = torch.sigmoid(lse - sinks[:, None].to(lse.dtype))
    return (out.to(lse.dtype) * share[..., None]).to(out.dtype)


def partial_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    *,
    starts: Tensor | None,
    scale: float,
    exact_out: bool,
) -> tuple[Tensor, Tensor]:
    """What `partial_attention` returns, without autograd; `exact_out`: out in the dtype of lse."""
    exact = exact_dtype(query.dtype)
    low = exact if exact_out else query.dtype
    batch, heads, length, _ = query.shape
    out = value.new_zeros(batch, length, heads, value.shape[-1], dtype=low).transpose(1, 2)
    lse = query.new_full((batch, heads, length), -torch.inf, dtype=exact)
    for part in parts_of(query, key, query_index, key_index, starts):
        q = query[part.rows, part.heads]
        k = flat(key[part.rows, part.kv_heads], part.kv_count, exact) * scale
        v = flat(value[part.rows, part.kv_heads], part.kv_count, low)
        for tile in part.tiles:
            queries = flat(q[:, :, tile.queries], part.kv_count, exact)
            scores = tile.scores(queries, k, q.shape[0])
            highest = scores.amax(-1, keepdim=True)
            highest.masked_fill_(highest == -torch.inf, 0.0)
            total = scores.sub_(highest).exp_().sum(-1, keepdim=True)
            weights = scores.div_(total.masked_fill(total == 0, 1.0)).to(low)
            block = out[part.rows, part.heads, tile.queries]
            block.copy_(torch.bmm(weights, v[:, tile.keys]).view(block.shape))
            block_lse = lse[part.rows, part.heads, tile.queries]
            block_lse.copy_(total.log_().add_(highest).view(block_lse.shape))
    return out, lse


def partial_attention_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    *,
    starts: Tensor | None,
    scale: float,
    lse: Tensor,
    grad: Tensor,
    delta: Tensor | None = None,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value from the keys given, in the softmax's dtype.

    The scores are computed again. With the `lse` and `delta` of a softmax of which these keys are a
    part, the gradients are these keys' part of the whole.

    Args:
        query, key, value, query_index, key_index, starts, scale: as in `partial_attention`.
        lse: `[B, H, Sq]`.
        grad: gradient of out, `[B, H, Sq, Pv]`.
        delta: `[B, H, Sq]`, see `row_delta`; None: these keys are all, and it is found on the way,
            more exactly than from an out that was rounded.
        grad_lse: gradient of lse, `[B, H, Sq]`, if it is not in `delta` already.
    """
    exact = exact_dtype(query.dtype)
    grads = tuple(torch.zeros_like(x, dtype=exact) for x in (query, key, value))
    for part in parts_of(query, key, query_index, key_index, starts):
        of_queries, of_keys = (part.rows, part.heads), (part.rows, part.kv_heads)
        _part_backward(
            part,
            [x[of_queries] for x in (query, grad, lse)],
            [x[of_keys] for x in (key, value)],
            [None if x is None else x[of_queries] for x in (delta, grad_lse)],
            [grads[0][of_queries], grads[1][of_keys], grads[2][of_keys]],
            scale,
        )
    return grads[0], grads[1], grads[2]


def _part_backward(  # noqa: PLR0917 - the tensors of a part, by what they are of
    part: Part,
    of_queries: list[Tensor],
    of_keys: list[Tensor],
    of_rows: list[Tensor | None],
    grads: list[Tensor],
    scale: float,
) -> None:
    """Fills the gradients of some rows and heads."""
    query, grad, lse = of_queries
    low, exact, count = query.dtype, grads[0].dtype, part.kv_count
    k_low, v = (flat(x, count, low) for x in of_keys)
    k = k_low.to(exact) * scale
    grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v, dtype=exact)
    for tile in part.tiles:
        q, g = (flat(x[:, :, tile.queries], count, low) for x in (query, grad))
        row_lse = flat(lse[:, :, tile.queries, None], count, exact)
        row_lse = row_lse.masked_fill(row_lse == -torch.inf, torch.inf)  # nothing seen: weights 0
        weights = tile.scores(q.to(exact), k, query.shape[0]).sub_(row_lse).exp_()
        grad_v[:, tile.keys] += torch.bmm(weights.to(low).mT, g)
        grad_weights = torch.bmm(g, v[:, tile.keys].mT).to(exact)
        delta, grad_lse = (
            None if x is None else flat(x[:, :, tile.queries, None], count, exact) for x in of_rows
        )
        if delta is None:
            delta = (grad_weights * weights).sum(-1, keepdim=True)
        if grad_lse is not None:
            delta = delta - grad_lse
        grad_scores = grad_weights.sub_(delta).mul_(weights).to(low)
        grad_k[:, tile.keys] += torch.bmm(grad_scores.mT, q)
        block = grads[0][:, :, tile.queries]
        torch.mul(torch.bmm(grad_scores, k_low[:, tile.keys]).view(block.shape), scale, out=block)
    torch.mul(grad_k.view(grads[1].shape), scale, out=grads[1])
    grads[2].copy_(grad_v.view(grads[2].shape))


def row_delta(out: Tensor, grad: Tensor, grad_lse: Tensor | None) -> Tensor:
    """`[B, H, Sq]`: what is taken from the gradient of each weight: grad . out - grad_lse.

    The derivative of a softmax row takes the weighted mean of its gradients, which is grad . out;
    that of lse is the softmax itself. (Dao et al. 2022, arXiv 2205.14135, algorithm 4)
    """
    exact = exact_dtype(grad.dtype)
    delta = (grad.to(exact) * out.to(exact)).sum(-1)
    return delta if grad_lse is None else delta - grad_lse


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of scores, softmax and sums for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@torch.library.custom_op("armillary::partial_attention", mutates_args=())
def _partial(  # noqa: PLR0917 - autograd passes by position
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    starts: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return partial_attention_forward(
        query, key, value, query_index, key_index, starts=starts, scale=scale, exact_out=False
    )


@_partial.register_fake
def _(  # noqa: PLR0917 - autograd passes by position
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    starts: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = query.shape
    out = value.new_empty(batch, length, heads, value.shape[-1], dtype=query.dtype)
    lse = query.new_empty((batch, heads, length), dtype=exact_dtype(query.dtype))
    return out.transpose(1, 2), lse


@torch.library.custom_op("armillary::partial_attention_backward", mutates_args=())
def _partial_backward(  # noqa: PLR0917 - autograd passes by position
    grad: Tensor,
    grad_lse: Tensor | None,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    starts: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = partial_attention_backward(
        query,
        key,
        value,
        query_index,
        key_index,
        starts=starts,
        scale=scale,
        lse=lse,
        grad=grad,
        grad_lse=grad_lse,
    )
    grad_q, grad_k, grad_v = (x.to(query.dtype) for x in grads)
    return grad_q, grad_k, grad_v


@_partial_backward.register_fake
def _(  # noqa: PLR0917 - autograd passes by position
    grad: Tensor,
    grad_lse: Tensor | None,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    starts: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[1])
    ctx.value_width, ctx.out_dtype = output[0].shape[-1], output[0].dtype


def _backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, lse = ctx.saved_tensors
    if grad is None:
        grad = lse.new_zeros((*lse.shape, ctx.value_width), dtype=ctx.out_dtype)
    grads = _partial_backward(grad, grad_lse, lse, *tensors, ctx.scale)
    return *grads, None, None, None, None


_partial.register_autograd(_backward, setup_context=_setup)
