"""Collectives over 2 and 4 ranks against the same sums in one process, exactly: all numbers are
small integers, which every format holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from armillary.parallel.collectives import (
    Exchange,
    Gathering,
    all_gather,
    all_gather_copies,
    all_reduce,
    all_to_all,
    copy_to,
    exchange_dims,
    group_name,
    maximum,
    reduce_scatter,
    ring_exchange,
)
from ranks import run_ranks

Parts = list[Tensor]
"""A tensor of each rank."""


@dataclass(frozen=True)
class Case:
    """A collective of one rank, and what it does to the tensors of all ranks."""

    ours: Callable[[Tensor, str, int], Tensor]
    """Of the tensor, the group and its size."""
    theirs: Callable[[Parts], Parts]
    copies_in: bool = False
    """Whether all ranks hold the same, and the gradient is a sum over ranks."""
    copies_out: bool = False
    """Whether all ranks compute the same of the result, which counts once."""


def scattered(parts: Parts, dim: int) -> Parts:
    return list(torch.stack(parts).sum(0).chunk(len(parts), dim))


def rolled(parts: Parts, shift: int) -> Parts:
    return [parts[(rank - shift) % len(parts)] for rank in range(len(parts))]


def dealt(parts: Parts) -> Parts:
    cut = [part.chunk(len(parts)) for part in parts]
    return [torch.cat([row[rank] for row in cut]) for rank in range(len(parts))]


def counts(rank: int, ranks: int) -> list[int]:
    """Rows that a rank sends to each: uneven, some none; they sum to 8 with what is left."""
    sent = [(rank + to) % 3 for to in range(ranks - 1)]
    return [*sent, 8 - sum(sent)]


def dealt_unevenly(parts: Parts) -> Parts:
    ranks = len(parts)
    cut = [part.split(counts(rank, ranks)) for rank, part in enumerate(parts)]
    return [torch.cat([row[rank] for row in cut]) for rank in range(ranks)]


def send_unevenly(x: Tensor, group: str, ranks: int) -> Tensor:
    rank = dist.get_rank()
    receive = [counts(origin, ranks)[rank] for origin in range(ranks)]
    return all_to_all(x, group, send=counts(rank, ranks), receive=receive)


def heads_for_sequence(parts: Parts) -> Parts:
    """Whole sequence (dim 1), of some of the heads (dim 0)."""
    return list(torch.cat(parts, 1).chunk(len(parts), 0))


CASES = {
    "all_gather 0": Case(lambda x, g, _: all_gather(x, 0, g), lambda p: [torch.cat(p)] * len(p)),
    "all_gather -2": Case(
        lambda x, g, _: all_gather(x, -2, g), lambda p: [torch.cat(p, 1)] * len(p)
    ),
    "all_gather of a transposed": Case(
        lambda x, g, _: all_gather(x.mT, 2, g),
        lambda p: [torch.cat([x.mT for x in p], 2)] * len(p),
    ),
    "all_gather_copies": Case(
        lambda x, g, _: all_gather_copies(x, -1, g),
        lambda p: [torch.cat(p, -1)] * len(p),
        copies_out=True,
    ),
    "reduce_scatter 0": Case(lambda x, g, _: reduce_scatter(x, 0, g), lambda p: scattered(p, 0)),
    "reduce_scatter 1": Case(lambda x, g, _: reduce_scatter(x, 1, g), lambda p: scattered(p, 1)),
    "all_reduce": Case(
        lambda x, g, _: all_reduce(x, g), lambda p: [torch.stack(p).sum(0)] * len(p),
        copies_out=True,
    ),
    "copy_to": Case(lambda x, g, _: copy_to(x, g), lambda p: p, copies_in=True),
    "all_to_all": Case(lambda x, g, _: all_to_all(x, g), dealt),
    "all_to_all uneven": Case(send_unevenly, dealt_unevenly),
    "exchange_dims": Case(lambda x, g, _: exchange_dims(x, 0, 1, g), heads_for_sequence),
    "ring 1": Case(lambda x, g, _: ring_exchange(x, g), lambda p: rolled(p, 1)),
    "ring -1": Case(lambda x, g, _: ring_exchange(x.mT, g, -1).mT, lambda p: rolled(p, -1)),
}  # fmt: skip


def inputs(ranks: int, dtype: torch.dtype, *, copies: bool, seed: int) -> Parts:
    generator = torch.Generator().manual_seed(seed)
    whole = [torch.randint(-8, 9, (8, 4, 3), generator=generator).to(dtype) for _ in range(ranks)]
    return [whole[0]] * ranks if copies else whole


def check(case: Case, dtype: torch.dtype, group: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = inputs(ranks, dtype, copies=case.copies_in, seed=1)
    expected = case.theirs(parts)[rank]
    own = parts[rank].clone().requires_grad_(dtype.is_floating_point)
    out = case.ours(own, group, ranks)
    assert torch.equal(out, expected)
    if not dtype.is_floating_point:
        return
    leaves = [part.clone().requires_grad_() for part in parts]
    if case.copies_in:
        leaves = [leaves[0]] * ranks
    outputs = case.theirs(leaves)
    generator = torch.Generator().manual_seed(2)
    weights = [
        torch.randint(-4, 5, output.shape, generator=generator).to(dtype) for output in outputs
    ]
    if case.copies_out:
        weights = [weights[0]] * ranks
        (outputs[0] * weights[0]).sum().backward()
    else:
        sum((x * w).sum() for x, w in zip(outputs, weights, strict=True)).backward()
    (out * weights[rank]).sum().backward()
    assert torch.equal(own.grad, leaves[rank].grad)


def check_all() -> list[str]:
    torch.set_num_threads(1)
    group = group_name(dist.group.WORLD)
    assert group is not None
    failed = []
    for name, case in CASES.items():
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            try:
                check(case, dtype, group)
            except AssertionError as error:
                failed.append(f"{name} {dtype}: {error!r}")
    check_under_way(group)
    check_operators(group)
    check_compiled(group)
    return failed


def check_under_way(group: str) -> None:
    """The halves that others compute between."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.full((2, 3), float(rank))
    gathering, exchange, further = Gathering(x, 1, group), Exchange(x, group), Exchange(x, group, 2)
    assert exchange.wait().unique().item() == (rank - 1) % ranks
    assert further.wait().unique().item() == (rank - 2) % ranks
    whole = gathering.wait()
    assert maximum(x, group).unique().item() == ranks - 1
    assert whole.shape == (2, 3 * ranks) and whole[1, ::3].tolist() == list(range(ranks))


def check_operators(group: str) -> None:
    """What is said of each operator to the compiler is what it does."""
    x = torch.ones(8, 4, 3, requires_grad=True)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    ranks = dist.get_world_size()
    sent = [8 // ranks] * ranks
    for name, arguments in {
        "all_gather": (1, group), "all_gather_copies": (1, group), "reduce_scatter": (1, group),
        "own_part": (0, group), "all_reduce": (group,), "maximum": (group,), "copy_to": (group,),
        "all_to_all": (group,), "all_to_all_uneven": (sent, sent, group),
        "ring_exchange": (1, group),
    }.items():  # fmt: skip
        operator = getattr(torch.ops.armillary, name).default
        value = x.detach() if name in ("own_part", "maximum") else x
        torch.library.opcheck(operator, (value, *arguments), test_utils=tests)


def check_compiled(group: str) -> None:
    """One graph without breaks, with the gradients of the eager function."""

    def mixed(x: Tensor) -> Tensor:
        x = all_gather(x * 2, 1, group)
        x = exchange_dims(x, 0, 1, group)
        x = ring_exchange(x + 1, group)
        return reduce_scatter(x * x, 1, group)

    rank = dist.get_rank()
    compiled = torch.compile(mixed, backend="aot_eager", fullgraph=True)
    eager_x, compiled_x = (torch.arange(96.0).view(8, 4, 3) + rank for _ in range(2))
    eager, traced = mixed(eager_x.requires_grad_()), compiled(compiled_x.requires_grad_())
    eager.sum().backward()
    traced.sum().backward()
    assert torch.equal(eager, traced) and torch.equal(eager_x.grad, compiled_x.grad)


@pytest.mark.parametrize("world_size", [2, 4])
def test_values_and_gradients_are_those_of_one_process(world_size: int) -> None:
    assert run_ranks(check_all, world_size) == [[]] * world_size


def test_a_group_of_one_is_the_identity() -> None:
    x = torch.ones(4, 2, requires_grad=True)
    results = [
        all_gather(x, 0, None), all_gather_copies(x, 0, None), reduce_scatter(x, 0, None),
        all_reduce(x, None), maximum(x, None), copy_to(x, None), all_to_all(x, None),
        exchange_dims(x, 0, 1, None), ring_exchange(x, None),
    ]  # fmt: skip
    assert all(result is x for result in results)
    assert group_name(None) is None


def test_the_private_part_of_torch_is_where_it_was() -> None:
    """Written for torch 2.11 to 2.13: groups are looked up by name."""
    assert callable(distributed_c10d._resolve_process_group)
    assert torch.__version__.split(".")[:2] in (["2", "11"], ["2", "12"], ["2", "13"])
