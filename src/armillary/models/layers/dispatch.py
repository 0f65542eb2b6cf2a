"""Rows to experts and back, on one device: gathers both ways, so the same sums on every run.

A *slot* is one of the k places of a token: slot t k + j is the j-th expert of token t. Sorting
slots by expert, stably, gives the order in which experts read rows. Whoever moves rows between
devices does it between `to_experts` and `from_experts`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from armillary.models.layers.experts import Experts


class Routing(NamedTuple):
    """Which experts each token goes to."""

    expert: Tensor
    """`[T, k]` int64."""
    weight: Tensor
    """`[T, k]` fp32, factor of each expert's output; carries the router's gradient."""
    counts: Tensor
    """`[E]` int64, slots of each expert."""


class SlotOrder(NamedTuple):
    """The slots of T tokens sorted by expert, and the way back."""

    order: Tensor
    """`[T k]` int64: the slot that each sorted row holds."""
    inverse: Tensor
    """`[T k]` int64: the sorted row that holds each slot."""


def sorted_slots(expert: Tensor) -> SlotOrder:
    """Slots of expert `[T, k]` by expert; slots of one expert stay in their order."""
    order = expert.flatten().argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return SlotOrder(order, inverse)


def to_experts(x: Tensor, slots: SlotOrder, k: int) -> Tensor:
    """x `[T, D]` -> `[T k, D]`, a row for each slot, sorted by expert."""
    out: Tensor = _ToExperts.apply(x, slots.order, slots.inverse, k)  # type: ignore[no-untyped-call]
    return out


def from_experts(rows: Tensor, weight: Tensor, slots: SlotOrder) -> Tensor:
    """rows `[T k, D]` sorted by expert, weight `[T, k]` -> weighted sums `[T, D]`.

    The k rows of a token are added in the order of its slots, in fp32, and rounded once.
    """
    out: Tensor = _FromExperts.apply(rows, weight, slots.order, slots.inverse)  # type: ignore[no-untyped-call]
    return out


def dispatch_locally(x: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """x `[T, D]` through its experts, all of them here -> `[T, D]`."""
    slots = sorted_slots(routing.expert)
    rows = to_experts(x, slots, routing.expert.shape[1])
    return from_experts(experts(rows, routing.counts), routing.weight, slots)


def exact(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over numbers of this one: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        by_slot = inverse.view(-1, ctx.k)  # [T, k]
        total = grad.new_zeros(by_slot.shape[0], grad.shape[1], dtype=exact(grad.dtype))
        for slot in by_slot.unbind(1):
            total += grad[slot]
        return total.to(grad.dtype), None, None, None


class _FromExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, order, inverse)
        by_slot = inverse.view(weight.shape)
        total = rows.new_zeros(weight.shape[0], rows.shape[1], dtype=exact(rows.dtype))
        for slot, factor in zip(by_slot.unbind(1), weight.unbind(1), strict=True):
            total.addcmul_(rows[slot].to(total.dtype), factor[:, None].to(total.dtype))
        return total.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weight, order, inverse = ctx.saved_tensors
        grad = grad.to(exact(grad.dtype))
        factor = weight.flatten()[order].to(grad.dtype)  # [T k]
        grad_rows = (grad[order // weight.shape[1]] * factor[:, None]).to(rows.dtype)
        grad_weight = torch.stack(
            [(grad * rows[slot]).sum(-1) for slot in inverse.view(weight.shape).unbind(1)], dim=1
        )
        return grad_rows, grad_weight.to(weight.dtype), None, None
