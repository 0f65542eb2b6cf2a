"""Keys and values travel round a ring of ranks; queries stay. Memory is that of a rank's own part.

(Liu, Zaharia, Abbeel 2023, arXiv 2310.01889) What a rank meets in one step is a part of the
softmax, merged by its lse. In the backward pass keys and values travel once more, followed by their
gradients, one step behind, which come home at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from armillary.kernels import attention_with_sinks
from armillary.kernels.partial_attention import (
    exact_dtype,
    partial_attention_backward,
    partial_attention_forward,
    row_delta,
)
from armillary.models.layers.attention_core import AttentionCore
from armillary.parallel.collectives import Exchange, resolve_group


class RingSight(NamedTuple):
    """What this rank's queries see of whole rows, and who holds what."""

    starts: Tensor
    """`[B, S / R]`, the first index that each query sees."""
    indices: Tensor
    """`[R, S / R]`, index in the row of each token of each rank, ascending."""
    group: str
    """Name of the group of ranks."""


def attend(
    core: AttentionCore, query: Tensor, key: Tensor, value: Tensor, sight: RingSight
) -> Tensor:
    """Query `[B, H, S / R, P]`, key and value `[B, K, S / R, P]` -> `[B, H, S / R, Pv]`."""
    scale = query.shape[-1] ** -0.5 if core.scale is None else core.scale
    out, lse = ring_attention(
        query, key, value, sight.starts, sight.indices, scale=scale, group=sight.group
    )
    return out if core.sinks is None else attention_with_sinks(out, lse, core.sinks)


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    indices: Tensor,
    *,
    scale: float,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries to the keys of all ranks. Differentiable, lse too.

    Args:
        query: `[B, H, S / R, P]`, this rank's.
        key: `[B, K, S / R, P]`, this rank's.
        value: `[B, K, S / R, Pv]`, this rank's.
        starts: `[B, S / R]`, the first index that each query sees.
        indices: `[R, S / R]`, index in the row of each token of each rank, ascending.
        scale: factor of the scores.
        group: name of the group of ranks.

    Returns:
        out `[B, H, S / R, Pv]` and lse `[B, H, S / R]`.
    """
    out, lse = _ring(query, key, value, starts, indices, scale, group)
    return out, lse


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """One flat buffer, to be sent as one message."""
    return torch.cat([x.flatten() for x in tensors])


def _unpacked(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(buffer, [x.numel() for x in like])
    return [part.view(x.shape) for part, x in zip(parts, like, strict=True)]


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Adds a part of the softmax to what out and lse hold. In place."""
    total = torch.logaddexp(lse, part_lse)
    finite = total.masked_fill(total == -torch.inf, 0.0)  # nothing seen yet: weights of 0, not NaN
    out.mul_((lse - finite).exp_()[..., None])
    out.addcmul_(part, (part_lse - finite).exp_()[..., None])
    lse.copy_(total)


@torch.library.custom_op("armillary::ring_attention", mutates_args=())
def _ring(  # noqa: PLR0917 - autograd passes by position
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    indices: Tensor,
    scale: float,
    group: str,
) -> tuple[Tensor, Tensor]:
    ranks, rank = resolve_group(group).size(), resolve_group(group).rank()
    out, lse = _empty_results(query, value, exact_dtype(query.dtype))
    out.zero_()
    lse.fill_(-torch.inf)
    held = _packed((key, value))
    for step in range(ranks):
        travel = Exchange(held, group) if step < ranks - 1 else None
        near_key, near_value = _unpacked(held, (key, value))
        part = partial_attention_forward(
            query,
            near_key,
            near_value,
            indices[rank],
            indices[(rank - step) % ranks],
            starts=starts,
            scale=scale,
            exact_out=True,
        )
        _merge(out, lse, *part)
        if travel is not None:
            held = travel.wait()
    return out.to(query.dtype), lse


@torch.library.custom_op("armillary::ring_attention_backward", mutates_args=())
def _ring_backward(  # noqa: PLR0917 - autograd passes by position
    grad: Tensor,
    delta: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    indices: Tensor,
    scale: float,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    ranks, rank = resolve_group(group).size(), resolve_group(group).rank()
    exact = exact_dtype(query.dtype)
    grad_query = torch.zeros_like(query, dtype=exact)
    held = _packed((key, value))
    homeward: Exchange | None = None  # gradients of the keys held before, one step behind them
    for step in range(ranks):
        travel = Exchange(held, group) if step < ranks - 1 else None
        near_key, near_value = _unpacked(held, (key, value))
        part, *near_grads = partial_attention_backward(
            query,
            near_key,
            near_value,
            indices[rank],
            indices[(rank - step) % ranks],
            starts=starts,
            scale=scale,
            lse=lse,
            grad=grad,
            delta=delta,
        )
        grad_query += part
        grads = _packed(near_grads)
        if homeward is not None:
            grads += homeward.wait()
        homeward = Exchange(grads, group)
        if travel is not None:
            held = travel.wait()
    assert homeward is not None
    # Copies: what an operator returns must not share memory.
    home = [x.to(key.dtype, copy=True) for x in _unpacked(homeward.wait(), (key, value))]
    return grad_query.to(query.dtype), home[0], home[1]


def _empty_results(query: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """out in `dtype`, which lies in memory as `[B, S / R, H, Pv]`, and lse."""
    batch, heads, length, _ = query.shape
    out = query.new_empty((batch, length, heads, value.shape[-1]), dtype=dtype).transpose(1, 2)
    return out, query.new_empty((batch, heads, length), dtype=exact_dtype(query.dtype))


@_ring.register_fake
def _(  # noqa: PLR0917 - autograd passes by position
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    indices: Tensor,
    scale: float,
    group: str,
) -> tuple[Tensor, Tensor]:
    return _empty_results(query, value, query.dtype)


@_ring_backward.register_fake
def _(  # noqa: PLR0917 - autograd passes by position
    grad: Tensor,
    delta: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    indices: Tensor,
    scale: float,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), key.new_empty(key.shape), value.new_empty(value.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.group = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    delta = row_delta(out, grad, grad_lse)
    grads = _ring_backward(grad, delta, lse, *tensors, ctx.scale, ctx.group)
    return *grads, None, None, None, None


_ring.register_autograd(_backward, setup_context=_setup)
