"""Products of experts in 8 bits: as in `products`, with rows that belong to one expert each.

Every recipe for float8 rounds experts row by row. Along tokens, which the gradient of a weight
reduces, each expert has scales of its own. Rounded operands are multiplied as the numbers that they
are, in a format that holds them exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.float8 import largest, numbers, round_to_float8
from armillary.kernels.grouped import grouped_linear, grouped_weight_gradient
from armillary.kernels.mx import BLOCK, mx_numbers, round_to_mx

Gradients = tuple[Tensor | None, Tensor | None, None, None]


@dataclass(frozen=True, slots=True)
class LowPrecisionGroupedProduct:
    """An `Experts.product` in 8 bits."""

    recipe: str
    """A key of `products.RECIPES`."""

    def __call__(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """x `[N, I]`, weight `[E, O, I]`, ends `[E]` -> `[N, O]`."""
        function = _GroupedMx if self.recipe == "mxfp8" else _GroupedRowwise
        exact = self.recipe == "float8-rowwise-exact-weight-gradient"
        y: Tensor = function.apply(x, weight, ends, exact)  # type: ignore[no-untyped-call]
        return y


class _GroupedRowwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, exact_weight_gradient: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.exact = exact_weight_gradient
        return _linear(_rounded(x), _rounded(weight), ends, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        x, weight, ends = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            # As for Linears: with exact gradients of weights, a weight has one scale here.
            maximum = largest(weight, (1, 2)) if ctx.exact else largest(weight, 1).mT
            w = numbers(round_to_float8(weight.mT, maximum))
            grad_x = _linear(_rounded(grad), w, ends, x.dtype)
        if ctx.needs_input_grad[1]:
            if ctx.exact:
                grad_weight = grouped_weight_gradient(grad, x, ends)
            else:
                g, a = _rounded_by_group(grad, ends), _rounded_by_group(x, ends)
                grad_weight = _weight_gradient(g, a, ends, x.dtype)
        return grad_x, grad_weight, None, None


class _GroupedMx(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, exact: bool) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return _linear(_blocked(x), _blocked(weight), ends, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        x, weight, ends = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _linear(_blocked(grad), _blocked(weight.mT), ends, x.dtype)
        if ctx.needs_input_grad[1]:
            g, a = _blocked_by_group(grad, ends), _blocked_by_group(x, ends)
            grad_weight = _weight_gradient(g, a, ends, x.dtype)
        return grad_x, grad_weight, None, None


def _rounded(x: Tensor) -> Tensor:
    """x `[..., I]` with a scale a row, as numbers."""
    return numbers(round_to_float8(x, largest(x, -1)))


def _rounded_by_group(x: Tensor, ends: Tensor) -> Tensor:
    """x `[N, I]` with a scale for each column of each group, as numbers."""
    group = _groups(x.shape[0], ends)
    maximum = x.new_zeros(ends.shape[0], x.shape[1], dtype=torch.float32)
    index = group[:, None].expand(x.shape)
    maximum = maximum.scatter_reduce(0, index, x.float().abs(), "amax")
    return numbers(round_to_float8(x, maximum[group]))


def _blocked(x: Tensor) -> Tensor:
    """x `[..., I]` in blocks along the last dim, as numbers."""
    return mx_numbers(round_to_mx(x))


def _blocked_by_group(x: Tensor, ends: Tensor) -> Tensor:
    """x `[N, I]` in blocks along the rows of each group, from its first on, as numbers."""
    group = _groups(x.shape[0], ends)
    counts = ends.diff(prepend=ends.new_zeros(1))
    whole = (counts + BLOCK - 1) // BLOCK * BLOCK  # rows of each group, filled up to blocks
    shift = (whole.cumsum(0) - whole) - (ends - counts)
    place = torch.arange(x.shape[0], device=x.device) + shift[group]
    most = x.shape[0] + ends.shape[0] * (BLOCK - 1)  # known without waiting for the device
    spread = x.new_zeros(most + -most % BLOCK, x.shape[1]).index_copy(0, place, x)
    return mx_numbers(round_to_mx(spread.mT)).mT[place]


def _groups(rows: int, ends: Tensor) -> Tensor:
    """The group of each row, `[N]`."""
    index = torch.arange(rows, device=ends.device, dtype=ends.dtype)
    return torch.bucketize(index, ends, right=True)


def _linear(x: Tensor, weight: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    return grouped_linear(_exact(x, dtype), _exact(weight, dtype), ends).to(dtype)


def _weight_gradient(g: Tensor, x: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    return grouped_weight_gradient(_exact(g, dtype), _exact(x, dtype), ends).to(dtype)


def _exact(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded numbers in bfloat16 where that is what the device multiplies; see `exact_product`."""
    on_device = x.device.type != "cpu" and dtype == torch.bfloat16
    return x.bfloat16() if on_device else x
