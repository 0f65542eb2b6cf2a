"""Tokens to experts that live on other ranks, and their outputs back: none dropped, none reordered.

Every rank sorts its slots by expert, so that what goes to one rank is one run of rows, and sends
that run as it is. What arrives is put in the order (expert, source rank, order at the source). That
order depends on who sent what and not on when it came, so an expert multiplies the same matrix on
every run. Where the tokens of a batch lie on the ranks of the group in their own order, it is even
the matrix that one process would multiply, and outputs, gradients of tokens and gradients of the
experts' weights are those of one process bit for bit. What is outside has to do its part: the
router's product must not depend on how many rows it has, which CPUs promise from 8 rows on, and the
activation not on where in memory an element lies: on CPUs, one thread a rank, and F a multiple of
32, so that no element is left over for the scalar version of a loop.

(The order of rows: UniEP, arXiv 2604.19241, section 3; sums over a token's slots, in their order,
are taken where the token lives, in `models.layers.dispatch`.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.models.layers.dispatch import Routing, from_experts, sorted_slots, to_experts
from armillary.models.layers.experts import Experts
from armillary.models.layers.recompute import once
from armillary.parallel.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    resolve_group,
)

Dispatch = Callable[[Tensor, Routing, Experts], Tensor]
"""(tokens `[T, D]`, where they go, the experts of this rank) -> `[T, D]`."""


@dataclass(frozen=True)
class ExchangedDispatch:
    """Dispatch to experts that are dealt, in equal contiguous parts, to the ranks of a group."""

    group: str
    """Name of the process group, over which the tokens lie as well."""

    def __call__(self, x: Tensor, routing: Routing, experts: Experts) -> Tensor:
        """x `[T, D]` of this rank through experts of all ranks -> `[T, D]`."""
        slots = sorted_slots(routing.expert)
        # A block that is run again for its activations sends as many rows as the first time.
        way = once(lambda: Way.agree(routing.counts, self.group))
        order, inverse = order_of_use(way.counts, sum(way.receive))
        rows = to_experts(x, slots, routing.expert.shape[1])  # [T k, D], by expert
        rows = all_to_all(rows, self.group, send=way.send, receive=way.receive)  # [N, D]
        rows = experts(_reordered(rows, order, inverse), way.counts.sum(0))
        rows = _reordered(rows, inverse, order)
        rows = all_to_all(rows, self.group, send=way.receive, receive=way.send)  # [T k, D]
        return from_experts(rows, routing.weight, slots)


@dataclass(frozen=True)
class GatheredDispatch:
    """Dispatch to experts each of which is cut, along F, over the ranks of a group.

    Between tensor-parallel regions the ranks of the group hold different tokens. Each takes the
    tokens of all through its part of the experts, and the parts of the sums are then added where
    the tokens came from. (Where all hold the same tokens, each gets its own copy's sum.)
    """

    group: str
    """Name of the process group."""
    inner: Dispatch
    """How the gathered tokens reach the experts."""

    def __call__(self, x: Tensor, routing: Routing, experts: Experts) -> Tensor:
        """x `[T, D]`, as many on each rank of the group -> `[T, D]`."""
        gathered = Routing(
            expert=all_gather(routing.expert, 0, self.group),  # [R T, k]
            weight=all_gather(routing.weight, 0, self.group),
            counts=all_reduce(routing.counts, self.group),
        )
        y = self.inner(all_gather(x, 0, self.group), gathered, experts)
        return reduce_scatter(y, 0, self.group)


@dataclass(frozen=True)
class Way:
    """How many rows go where, known on the host."""

    send: list[int]
    """Rows for each rank of the group."""
    receive: list[int]
    """Rows from each rank of the group."""
    counts: Tensor
    """`[R, E / R]` int64: rows from each rank for each expert of this one."""

    @classmethod
    @torch.no_grad()
    def agree(cls, counts: Tensor, group: str) -> Way:
        """Tells the owners of the experts how many rows will come; counts `[E]`, of this rank."""
        ranks = resolve_group(group)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts.contiguous(), group=ranks)
        both = torch.stack([counts, received]).view(2, ranks.size(), -1)  # [2, R, E / R]
        # The host has to know the sizes of what it allocates and sends: the layer's one wait.
        send, receive = both.sum(-1).tolist()
        return cls(send, receive, both[1])


def order_of_use(counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """From the order of arrival, (source, expert), to that of use, (expert, source).

    Args:
        counts: `[R, E]`, rows that came from each rank for each expert of this one.
        total: their sum, so that nothing has to ask the device for it.

    Returns:
        `[total]` the arrived row at each place of use, and its inverse.
    """
    arrival = _starts(counts.flatten()).view(counts.shape).T.flatten()  # [E R]
    lengths = counts.T.flatten()
    shift = (arrival - _starts(lengths)).repeat_interleave(lengths, output_size=total)
    places = torch.arange(total, device=counts.device)
    order = places + shift
    inverse = torch.empty_like(order)
    inverse[order] = places
    return order, inverse


def _starts(lengths: Tensor) -> Tensor:
    """Where each run of rows starts if they follow one another."""
    return lengths.cumsum(0) - lengths


def _reordered(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """rows[order]; a gather in both directions, so that nothing depends on the order of writes."""
    out: Tensor = _Reordered.apply(rows, order, inverse)  # type: ignore[no-untyped-call]
    return out


class _Reordered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None
