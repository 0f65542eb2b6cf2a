"""Products of Linears in 8 bits: what is rounded how, in the forward pass and in both gradients.

With x `[T, I]` and W `[O, I]`, a Linear is three products: y = x Wᵀ, grad x = g W, grad W = gᵀ x.
They reduce over inputs, outputs and tokens; a scale, or a block of them, never spans anything but
what its product reduces. Results are in the dtype of x, and x and W are kept for the backward pass
as they came.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.float8 import (
    E5M2,
    Scaled,
    float8_product,
    largest,
    round_to_float8,
    transposed,
)
from armillary.kernels.mx import mx_product, round_to_mx
from armillary.precision.float8_weights import Float8Weight

Maximum = Callable[[Tensor], Tensor]
"""The largest of each element over the ranks that hold parts of a matrix; called by all of them."""
Gradients = tuple[Tensor | None, Tensor | None, None]


@dataclass(frozen=True, slots=True)
class LowPrecisionProduct:
    """A `Linear.product` in 8 bits."""

    recipe: str
    """A key of `RECIPES`."""
    emulate: bool
    """Whether rounded operands are multiplied in fp32."""
    split: str | None = None
    """What the ranks of `maximum` divide between them: "outputs", "inputs" or nothing."""
    maximum: Maximum | None = None
    """See `Maximum`; None: no ranks."""
    float8_all_gather: bool = False
    """Whether data sharding, where there is any, gathers the weight as a `Float8Weight`."""

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """x `[..., I]` by weight `[O, I]` -> `[..., O]`."""
        rows = x.reshape(-1, x.shape[-1])
        y: Tensor = RECIPES[self.recipe].apply(rows, weight, self)  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], weight.shape[0])

    def multiply(self, a: Scaled, b: Scaled, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
        """a bᵀ."""
        return float8_product(a, b, dtype, emulate=self.emulate, fast=fast)

    def over_ranks(self, *maxima: Tensor, when: tuple[str, ...]) -> tuple[Tensor, ...]:
        """The maxima, over all ranks if what is split is one of `when`; one exchange for all."""
        if self.maximum is None or self.split not in when:
            return maxima
        whole = self.maximum(torch.cat([each.flatten() for each in maxima]))
        parts = torch.split(whole, [each.numel() for each in maxima])
        return tuple(part.view(each.shape) for part, each in zip(parts, maxima, strict=True))


class _Tensorwise(torch.autograd.Function):
    """One scale a tensor. Inputs and weights e4m3, gradients e5m2.

    Scales are powers of two, which torchao's are not: they then decide which numbers are too small
    to be kept, and no digit of the others. So results hardly depend on which tokens share a scale,
    which is those of a rank.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: LowPrecisionProduct) -> Tensor:
        ctx.how = how
        if isinstance(weight, Float8Weight):
            maxima = how.over_ranks(largest(x), when=("outputs", "inputs"))
            w = weight.scaled()
        else:
            maxima = how.over_ranks(largest(x), largest(weight), when=("outputs", "inputs"))
            w = round_to_float8(weight, maxima[1])
        ctx.save_for_backward(x, weight, *maxima)
        return how.multiply(round_to_float8(x, maxima[0]), w, x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        x, weight, *maxima = ctx.saved_tensors
        how: LowPrecisionProduct = ctx.how
        (maximum,) = how.over_ranks(largest(grad), when=("outputs", "inputs"))
        g = round_to_float8(grad, maximum, E5M2)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            rounded = isinstance(weight, Float8Weight)
            w = weight.scaled() if rounded else round_to_float8(weight, maxima[1])
            grad_x = how.multiply(g, transposed(w), x.dtype)
        if ctx.needs_input_grad[1]:
            a = round_to_float8(x, maxima[0])
            grad_weight = how.multiply(transposed(g), transposed(a), x.dtype)
        return grad_x, grad_weight, None


class _Rowwise(torch.autograd.Function):
    """One scale for each row of each operand, along what is reduced; all e4m3."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: LowPrecisionProduct) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = how
        return _rowwise_forward(x, weight, how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        how: LowPrecisionProduct = ctx.how
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            maxima = how.over_ranks(largest(grad, 1), largest(weight.mT, 1), when=("outputs",))
            g, w = round_to_float8(grad, maxima[0]), round_to_float8(weight.mT, maxima[1])
            grad_x = how.multiply(g, w, x.dtype)
        if ctx.needs_input_grad[1]:
            g = round_to_float8(grad.mT, largest(grad.mT, 1))
            a = round_to_float8(x.mT, largest(x.mT, 1))
            grad_weight = how.multiply(g, a, x.dtype)
        return grad_x, grad_weight, None


class _RowwiseExactWeightGradient(torch.autograd.Function):
    """Like `_Rowwise`; grad W is not rounded, and in grad x the weight has one scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: LowPrecisionProduct) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = how
        return _rowwise_forward(x, weight, how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        how: LowPrecisionProduct = ctx.how
        grad_x = None
        if ctx.needs_input_grad[0]:
            (row_maximum,) = how.over_ranks(largest(grad, 1), when=("outputs",))
            (maximum,) = how.over_ranks(largest(weight), when=("outputs", "inputs"))
            w = round_to_float8(weight, maximum)
            grad_x = how.multiply(round_to_float8(grad, row_maximum), transposed(w), x.dtype)
        grad_weight = grad.mT @ x if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


class _Mx(torch.autograd.Function):
    """Blocks of 32 along what is reduced; all e4m3. Ranks split between blocks, never inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: LowPrecisionProduct) -> Tensor:
        ctx.save_for_backward(x, weight)
        return mx_product(round_to_mx(x), round_to_mx(weight), x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = mx_product(round_to_mx(grad), round_to_mx(weight.mT), x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = mx_product(round_to_mx(grad.mT), round_to_mx(x.mT), x.dtype)
        return grad_x, grad_weight, None


def _rowwise_forward(x: Tensor, weight: Tensor, how: LowPrecisionProduct) -> Tensor:
    maxima = how.over_ranks(largest(x, 1), largest(weight, 1), when=("inputs",))
    a, w = round_to_float8(x, maxima[0]), round_to_float8(weight, maxima[1])
    return how.multiply(a, w, x.dtype, fast=True)


RECIPES: dict[str, type[torch.autograd.Function]] = {
    "float8-tensorwise": _Tensorwise,
    "float8-rowwise": _Rowwise,
    "float8-rowwise-exact-weight-gradient": _RowwiseExactWeightGradient,
    "mxfp8": _Mx,
}
