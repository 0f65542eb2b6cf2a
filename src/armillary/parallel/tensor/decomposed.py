"""Products that hide the communication before or after them, in steps around a ring.

Each rank multiplies the tokens that it has while its neighbour's are on their way, or computes its
share of the next partial sum while the last one travels. (Wang et al. 2023, "Overlap communication
with dependent computation via decomposition", section 3)

`gather_linear` and `linear_scatter` are opaque to compilation like the operators of `collectives`;
values and gradients are those of `all_gather` then `linear`, and of `linear` then `reduce_scatter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels import swiglu
from armillary.parallel.collectives import Exchange, Gathering, resolve_group, resolve_size
from armillary.parallel.tensor import symmetric
from armillary.parallel.tensor.region import SEQUENCE


def gather_linear(x: Tensor, weights: list[Tensor], group: str) -> list[Tensor]:
    """Share `[..., S/R, D]`, gathered to whole rows, times each weight `[O, D]`: `[..., S, O]`."""
    products: list[Tensor] = _gather_linear(x, weights, group)
    return products


def linear_scatter(inputs: Sequence[Tensor], weight: Tensor, group: str) -> Tensor:
    """x `[..., S, F]` times weight `[D, F]`, summed over ranks: this one's `[..., S/R, D]`.

    Args:
        inputs: x; or gate and up, of which x = silu(gate) * up is made, and not kept.
        weight: of the same dtype.
        group: name of the ranks.
    """
    out: Tensor = _linear_scatter(list(inputs), weight, group)
    return out


def _gather_and_multiply(
    x: Tensor, weights: list[Tensor], group: str
) -> tuple[Tensor, list[Tensor]]:
    """What `gather_linear` returns, and the whole rows that it gathered."""
    if symmetric.is_usable(x, group):
        return symmetric.gather_and_multiply(x, weights, group)
    ranks = resolve_group(group)
    size, rank = ranks.size(), ranks.rank()
    rows = _empty_rows(x, x.shape[-1], size)
    products = [_empty_rows(x, weight.shape[0], size) for weight in weights]
    part = x.contiguous()
    for step in range(size):
        exchange = Exchange(part, group) if step < size - 1 else None
        origin = (rank - step) % size
        _part(rows, origin, size).copy_(part)
        for product, weight in zip(products, weights, strict=True):
            _part(product, origin, size).copy_(F.linear(part, weight))
        if exchange is not None:
            part = exchange.wait()
    return rows, products


def _multiply_and_scatter(xs: list[Tensor], weights: list[Tensor], group: str) -> Tensor:
    """The sum over pairs, and then over ranks, of x wᵀ; this rank's share of it.

    The sum of rank d's share starts at its neighbour d + 1 and goes around the ring to d.
    """
    if symmetric.is_usable(xs[0], group):
        return symmetric.multiply_and_scatter(xs, weights, group)
    ranks = resolve_group(group)
    size, rank = ranks.size(), ranks.rank()
    total = _own_sum([_part(x, (rank - 1) % size, size) for x in xs], weights)
    for step in range(1, size):
        exchange = Exchange(total, group)
        target = (rank - 1 - step) % size
        total = _own_sum([_part(x, target, size) for x in xs], weights)
        total += exchange.wait()
    return total


def _own_sum(xs: list[Tensor], weights: list[Tensor]) -> Tensor:
    total = F.linear(xs[0], weights[0])
    for x, weight in zip(xs[1:], weights[1:], strict=True):
        total += F.linear(x, weight)
    return total


def _empty_rows(x: Tensor, width: int, size: int) -> Tensor:
    """An empty tensor for whole rows of which `x` is a share, with another last dim."""
    return x.new_empty((*x.shape[:-2], x.shape[SEQUENCE] * size, width))


def _part(rows: Tensor, index: int, size: int) -> Tensor:
    """The share of rank `index`; the same memory."""
    share = rows.shape[SEQUENCE] // size
    return rows.narrow(SEQUENCE, index * share, share)


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """gradᵀ x over all tokens, one product."""
    return grad.reshape(-1, grad.shape[-1]).mT @ x.reshape(-1, x.shape[-1])


@torch.library.custom_op("armillary::gather_linear", mutates_args=())
def _gather_linear(x: Tensor, weights: list[Tensor], group: str) -> list[Tensor]:
    return _gather_and_multiply(x, weights, group)[1]


@torch.library.custom_op("armillary::gather_linear_backward", mutates_args=())
def _gather_linear_backward(
    grads: list[Tensor], x: Tensor, weights: list[Tensor], group: str, trained: bool
) -> list[Tensor]:
    """Gradient of x, then those of trained weights. Rows are gathered again, not kept."""
    transposed = [weight.mT for weight in weights]
    if not trained:
        return [_multiply_and_scatter(grads, transposed, group)]
    gathering = Gathering(x, SEQUENCE, group)
    grad_x = _multiply_and_scatter(grads, transposed, group)
    rows = gathering.wait()
    return [grad_x, *(_weight_gradient(grad, rows) for grad in grads)]


@torch.library.custom_op("armillary::linear_scatter", mutates_args=())
def _linear_scatter(inputs: list[Tensor], weight: Tensor, group: str) -> Tensor:
    x = inputs[0] if len(inputs) == 1 else swiglu(*inputs)
    return _multiply_and_scatter([x], [weight], group)


@torch.library.custom_op("armillary::linear_scatter_backward", mutates_args=())
def _linear_scatter_backward(
    grad: Tensor, inputs: list[Tensor], weight: Tensor, group: str, trained: bool
) -> list[Tensor]:
    """Gradients of the inputs, then that of a trained weight."""
    rows, (grad_x,) = _gather_and_multiply(grad, [weight.mT], group)
    if len(inputs) == 1:
        return [grad_x, _weight_gradient(rows, inputs[0])] if trained else [grad_x]
    gate, up = inputs
    activated = F.silu(gate)
    own = [_weight_gradient(rows, activated * up)] if trained else []
    grad_gate = torch.ops.aten.silu_backward(grad_x * up, gate)
    return [grad_gate, grad_x.mul_(activated), *own]


@_gather_linear.register_fake
def _(x: Tensor, weights: list[Tensor], group: str) -> list[Tensor]:
    return [_empty_rows(x, weight.shape[0], resolve_size(group)) for weight in weights]


@_gather_linear_backward.register_fake
def _(
    grads: list[Tensor], x: Tensor, weights: list[Tensor], group: str, trained: bool
) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in (x, *(weights if trained else []))]


@_linear_scatter.register_fake
def _(inputs: list[Tensor], weight: Tensor, group: str) -> Tensor:
    x = inputs[0]
    share = x.shape[SEQUENCE] // resolve_size(group)
    return x.new_empty((*x.shape[:-2], share, weight.shape[0]))


@_linear_scatter_backward.register_fake
def _(
    grad: Tensor, inputs: list[Tensor], weight: Tensor, group: str, trained: bool
) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in (*inputs, *([weight] if trained else []))]


def _keep_gather(ctx: Any, inputs: tuple[Tensor, list[Tensor], str], output: Any) -> None:
    x, weights, ctx.group = inputs
    ctx.save_for_backward(x, *weights)


def _gather_gradient(
    ctx: Any, grads: list[Tensor]
) -> tuple[Tensor, list[Tensor] | list[None], None]:
    x, *weights = ctx.saved_tensors
    trained = any(ctx.needs_input_grad[1])
    grad_x, *grad_weights = _gather_linear_backward(grads, x, weights, ctx.group, trained)
    return grad_x, grad_weights if trained else [None] * len(weights), None


def _keep_scatter(ctx: Any, inputs: tuple[list[Tensor], Tensor, str], output: Any) -> None:
    factors, weight, ctx.group = inputs
    ctx.save_for_backward(weight, *factors)


def _scatter_gradient(ctx: Any, grad: Tensor) -> tuple[list[Tensor], Tensor | None, None]:
    weight, *factors = ctx.saved_tensors
    trained = ctx.needs_input_grad[1]
    grads = _linear_scatter_backward(grad, factors, weight, ctx.group, trained)
    return grads[: len(factors)], grads[-1] if trained else None, None


_gather_linear.register_autograd(_gather_gradient, setup_context=_keep_gather)
_linear_scatter.register_autograd(_scatter_gradient, setup_context=_keep_scatter)
