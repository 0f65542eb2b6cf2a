"""Many matrices, each multiplied with its own run of rows: the product inside a mixture of experts.

Rows are sorted by group; `ends` says where each group's rows end. One call to the library's
grouped kernel replaces a loop over groups, and nothing waits for the device. What the library does
not take (fp64, rows that do not start on its alignment) goes through the loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LIBRARY: Callable[..., Tensor] = getattr(torch.nn.functional, "grouped_mm", torch._grouped_mm)
"""The only place that names it: public in newer versions of torch, private in older ones."""
_ALIGNMENT = 16
"""Bytes on which the library wants every row and every tensor to start."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x_g weight_gᵀ for every group g.

    Groups may be empty, and there may be no rows at all; gradients are then zeros, never missing.

    Args:
        x: `[N, I]`, rows sorted by group.
        weight: `[E, O, I]`, of the same dtype.
        ends: `[E]` int32, one past the last row of each group; the last is N.

    Returns:
        `[N, O]`.
    """
    out: Tensor = _GroupedLinear.apply(x, weight, ends)  # type: ignore[no-untyped-call]
    return out


def grouped_bias(x: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
    """x_g + bias_g for every group g: x `[N, O]`, bias `[E, O]`, ends `[E]` int32."""
    out: Tensor = _GroupedBias.apply(x, bias, ends)  # type: ignore[no-untyped-call]
    return out


def grouped_weight_gradient(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """grad_gᵀ x_g for every group g: grad `[N, O]`, x `[N, I]`, ends `[E]` -> `[E, O, I]`."""
    out: Tensor = _by_group(grad, x, ends)
    return out


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        out: Tensor = _by_row(x, weight.mT, ends)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        grad_x = _by_row(grad, weight, ends) if ctx.needs_input_grad[0] else None
        grad_weight = _by_group(grad, x, ends) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


class _GroupedBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        rows = torch.arange(x.shape[0], device=x.device, dtype=ends.dtype)
        return x + bias[torch.bucketize(rows, ends, right=True)]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (ends,) = ctx.saved_tensors
        # A product with ones sums the rows of a group in a fixed order, on every device.
        ones = grad.new_ones(grad.shape[0], max(1, _ALIGNMENT // grad.element_size()))
        return grad, _by_group(grad, ones, ends)[..., 0].contiguous(), None


@torch.library.custom_op("armillary::grouped_by_row", mutates_args=())
def _by_row(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`[N, I]` by `[E, I, O]` -> `[N, O]`."""
    if x.shape[0] == 0:
        return x.new_zeros(0, weight.shape[2])
    x = _aligned(x)
    if _is_supported(x, weight):
        return _LIBRARY(x, weight, offs=ends).contiguous()
    out = x.new_empty(x.shape[0], weight.shape[2])
    for group, rows in enumerate(_slices(ends)):
        out[rows] = x[rows] @ weight[group]
    return out


@_by_row.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.custom_op("armillary::grouped_by_group", mutates_args=())
def _by_group(y: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """yᵀ x over the rows of each group: `[N, O]` and `[N, I]` -> `[E, O, I]`."""
    if x.shape[0] == 0:
        return x.new_zeros(ends.shape[0], y.shape[1], x.shape[1])
    x, y = _aligned(x), _aligned(y)
    if _is_supported(x, y):
        return _LIBRARY(y.mT, x, offs=ends).contiguous()
    out = x.new_empty(ends.shape[0], y.shape[1], x.shape[1])
    for group, rows in enumerate(_slices(ends)):
        out[group] = y[rows].mT @ x[rows]
    return out


@_by_group.register_fake
def _(y: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], y.shape[1], x.shape[1])


def _aligned(x: Tensor) -> Tensor:
    """x itself, or a copy where it is expanded, strided or starts in the middle of something."""
    return x if x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0 else x.clone()


def _is_supported(*tensors: Tensor) -> bool:
    """Whether the library multiplies these."""
    return all(
        t.dtype in _DTYPES
        and t.data_ptr() % _ALIGNMENT == 0
        and all(s == 1 or s * t.element_size() % _ALIGNMENT == 0 for s in t.stride())
        and min(t.stride()) == 1
        for t in tensors
    )


def _slices(ends: Tensor) -> list[slice]:
    bounds = [0, *ends.tolist()]
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]
