"""Differentiable collectives on plain tensors.

Each is one opaque operator, so that `torch.compile(fullgraph=True)` traces through a module that
calls it, activation checkpointing can name it, and tracing under fake tensors communicates nothing.
Groups are addressed by name (a string, see `group_name`); None is a group of one rank, on which
every function here is the identity.

Gradients are those of one sum over what all ranks compute. Two kinds of tensors matter: *parts*
(each rank has its own) and *copies* (the same on every rank, counted once). Where copies are used
differently by each rank, their gradients are partial, and are summed on the way back:

    function             forward                     backward
    all_gather           parts -> copies             reduce_scatter of partial gradients
    reduce_scatter       partial sums -> parts       all_gather
    all_reduce           partial sums -> copies      identity
    copy_to              copies -> copies            all_reduce of partial gradients
    all_gather_copies    parts -> copies             own part of gradients that are copies too
    all_to_all           parts -> parts              the reverse all_to_all
    ring_exchange        parts -> parts              the reverse exchange

The order of sums is the backend's, which depends on shapes and ranks only: a run repeats exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

# Since torch 2.13 under names of their own.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def group_name(group: ProcessGroup | None) -> str | None:
    """The name by which the functions of this module know a group; None if it is of one rank."""
    if group is None or group.size() == 1:
        return None
    return str(group.group_name)


def resolve_group(name: str) -> ProcessGroup:
    """The process group of that name."""
    # The one private part of torch here.
    group: ProcessGroup = distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
    return group


def all_gather(x: Tensor, dim: int, group: str | None) -> Tensor:
    """Equal parts of all ranks joined along a dim, in order of rank."""
    return x if group is None else _tensor(_all_gather(x, dim % x.dim(), group))


def all_gather_copies(x: Tensor, dim: int, group: str | None) -> Tensor:
    """Like `all_gather`, where every rank goes on to compute the same of the result."""
    return x if group is None else _tensor(_all_gather_copies(x, dim % x.dim(), group))


def reduce_scatter(x: Tensor, dim: int, group: str | None) -> Tensor:
    """This rank's part, along a dim that the group divides, of the sum over ranks."""
    return x if group is None else _tensor(_reduce_scatter(x, dim % x.dim(), group))


def all_reduce(x: Tensor, group: str | None) -> Tensor:
    """The sum over ranks, on every rank."""
    return x if group is None else _tensor(_all_reduce(x, group))


def maximum(x: Tensor, group: str | None) -> Tensor:
    """The largest of each element over ranks, on every rank. Not differentiable."""
    return x if group is None else _tensor(_maximum(x, group))


def copy_to(x: Tensor, group: str | None) -> Tensor:
    """The same values; each rank goes on to compute something else of them."""
    return x if group is None else _tensor(_copy_to(x, group))


def all_to_all(
    x: Tensor,
    group: str | None,
    *,
    send: list[int] | None = None,
    receive: list[int] | None = None,
) -> Tensor:
    """Part `r` of dim 0 goes to rank `r`; what the ranks sent here, in order of rank.

    Args:
        x: dim 0 is cut into parts.
        group: the ranks.
        send: length of the part for each rank; None: equal parts.
        receive: length of the part from each rank; given exactly when `send` is.
    """
    if group is None:
        return x
    if send is None or receive is None:
        assert send is receive is None, "uneven parts need both lists of lengths"
        return _tensor(_all_to_all(x, group))
    return _tensor(_all_to_all_uneven(x, send, receive, group))


def exchange_dims(x: Tensor, split: int, join: int, group: str | None) -> Tensor:
    """Cuts one dim over the ranks and joins another that was cut so: heads for sequence."""
    if group is None:
        return x
    ranks = _size_in_graphs(group)
    parts = torch.stack(x.chunk(ranks, split % x.dim()))  # [R, ...]
    received = all_to_all(parts, group)
    return torch.cat(received.unbind(0), join % x.dim())


def ring_exchange(x: Tensor, group: str | None, shift: int = 1) -> Tensor:
    """The tensor of the rank `shift` places before, while this one's goes as many places on."""
    return x if group is None else _tensor(_ring_exchange(x, shift, group))


class Exchange:
    """A `ring_exchange` under way, so that computation can hide it. Not differentiable.

    For use inside operators that overlap communication with their own computation.
    """

    def __init__(self, x: Tensor, group: str, shift: int = 1) -> None:
        self._sent = x.contiguous()  # held until it has arrived
        self._received = torch.empty_like(self._sent)
        self._work: list[dist.Work] = []
        ranks = resolve_group(group)
        size, rank = ranks.size(), ranks.rank()
        if shift % size == 0:
            self._received.copy_(self._sent)
            return
        to, origin = (rank + shift) % size, (rank - shift) % size
        operations = [
            dist.P2POp(dist.isend, self._sent, group=ranks, group_peer=to),
            dist.P2POp(dist.irecv, self._received, group=ranks, group_peer=origin),
        ]
        self._work = dist.batch_isend_irecv(operations)

    def wait(self) -> Tensor:
        """What arrived."""
        for work in self._work:
            work.wait()
        return self._received


class Gathering:
    """An `all_gather` under way, so that computation can hide it. Not differentiable."""

    def __init__(self, x: Tensor, dim: int, group: str) -> None:
        ranks = resolve_group(group)
        self._dim = dim % x.dim()
        self._sent = x.contiguous()  # held until it has arrived
        self._parts = x.new_empty((ranks.size(), *x.shape))
        self._work = _all_gather_single(
            self._parts.view(-1, *x.shape[1:]), self._sent, group=ranks, async_op=True
        )

    def wait(self) -> Tensor:
        """The parts of all ranks, joined."""
        if self._work is not None:
            self._work.wait()
        shape = list(self._sent.shape)
        shape[self._dim] *= self._parts.shape[0]
        return self._parts.movedim(0, self._dim).reshape(shape)


def resolve_size(group: str | None) -> int:
    """Ranks of the group."""
    return 1 if group is None else resolve_group(group).size()


_size_in_graphs: Callable[[str], int] = torch.compiler.assume_constant_result(  # type: ignore[no-untyped-call]
    resolve_size
)
"""The same for compiled code, which cannot look groups up."""


def _tensor(x: Any) -> Tensor:
    """The result of an operator, whose type torch does not state."""
    assert isinstance(x, Tensor)
    return x


def _scaled(x: Tensor, dim: int, numerator: int, denominator: int = 1) -> Tensor:
    """An empty tensor like x with one dim longer or shorter."""
    shape = list(x.shape)
    shape[dim] = shape[dim] * numerator // denominator
    return x.new_empty(shape)


@torch.library.custom_op("armillary::all_gather", mutates_args=())
def _all_gather(x: Tensor, dim: int, group: str) -> Tensor:
    return Gathering(x, dim, group).wait()


@torch.library.custom_op("armillary::all_gather_copies", mutates_args=())
def _all_gather_copies(x: Tensor, dim: int, group: str) -> Tensor:
    return _tensor(_all_gather(x, dim, group))


@torch.library.custom_op("armillary::own_part", mutates_args=())
def _own_part(x: Tensor, dim: int, group: str) -> Tensor:
    ranks = resolve_group(group)
    return x.chunk(ranks.size(), dim)[ranks.rank()].clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("armillary::reduce_scatter", mutates_args=())
def _reduce_scatter(x: Tensor, dim: int, group: str) -> Tensor:
    ranks = resolve_group(group)
    assert x.shape[dim] % ranks.size() == 0, f"{tuple(x.shape)}, dim {dim} over {ranks.size()}"
    shape = (*x.shape[:dim], ranks.size(), x.shape[dim] // ranks.size(), *x.shape[dim + 1 :])
    parts = x.reshape(shape).movedim(dim, 0).contiguous()
    out = x.new_empty(parts.shape[1:])
    _reduce_scatter_single(out, parts.flatten(0, 1), group=ranks)
    return out


@torch.library.custom_op("armillary::all_reduce", mutates_args=())
def _all_reduce(x: Tensor, group: str) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=resolve_group(group))
    return out


@torch.library.custom_op("armillary::maximum", mutates_args=())
def _maximum(x: Tensor, group: str) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, dist.ReduceOp.MAX, group=resolve_group(group))
    return out


@torch.library.custom_op("armillary::copy_to", mutates_args=())
def _copy_to(x: Tensor, group: str) -> Tensor:
    return x.clone()


@torch.library.custom_op("armillary::all_to_all", mutates_args=())
def _all_to_all(x: Tensor, group: str) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=resolve_group(group))
    return out


@torch.library.custom_op("armillary::all_to_all_uneven", mutates_args=())
def _all_to_all_uneven(x: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
    assert sum(send) == x.shape[0], f"parts {send} of {x.shape[0]}"
    out = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=resolve_group(group))
    return out


@torch.library.custom_op("armillary::ring_exchange", mutates_args=())
def _ring_exchange(x: Tensor, shift: int, group: str) -> Tensor:
    return Exchange(x, group, shift).wait()


@_all_gather.register_fake
@_all_gather_copies.register_fake
def _(x: Tensor, dim: int, group: str) -> Tensor:
    return _scaled(x, dim, resolve_size(group))


@_own_part.register_fake
@_reduce_scatter.register_fake
def _(x: Tensor, dim: int, group: str) -> Tensor:
    return _scaled(x, dim, 1, resolve_size(group))


@_all_reduce.register_fake
@_maximum.register_fake
@_all_to_all.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape)


@_copy_to.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x)


@_all_to_all_uneven.register_fake
def _(x: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
    return x.new_empty((sum(receive), *x.shape[1:]))


@_ring_exchange.register_fake
def _(x: Tensor, shift: int, group: str) -> Tensor:
    return x.new_empty(x.shape)


def _keep(*names: str) -> Callable[[Any, tuple[Any, ...], Any], None]:
    """Keeps the arguments after the tensor for the backward pass."""

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.arguments = dict(zip(names, inputs[1:], strict=True))

    return keep


def _differentiate(operator: Any, backward: Callable[..., Tensor], *names: str) -> None:
    """Registers `backward(grad, **arguments)`; the arguments after the tensor have these names."""

    def gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return backward(grad, **ctx.arguments), *(None for _ in names)

    operator.register_autograd(gradient, setup_context=_keep(*names))


_differentiate(_all_gather, _reduce_scatter, "dim", "group")
_differentiate(_reduce_scatter, _all_gather, "dim", "group")
_differentiate(_all_gather_copies, _own_part, "dim", "group")
_differentiate(_all_reduce, lambda grad, group: grad, "group")
_differentiate(_copy_to, _all_reduce, "group")
_differentiate(_all_to_all, _all_to_all, "group")
_differentiate(
    _all_to_all_uneven,
    lambda grad, send, receive, group: _all_to_all_uneven(grad, receive, send, group),
    "send",
    "receive",
    "group",
)
_differentiate(
    _ring_exchange,
    lambda grad, shift, group: _ring_exchange(grad, -shift, group),
    "shift",
    "group",
)
