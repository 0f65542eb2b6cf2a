"""What a rank sends, against sums made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from armillary.parallel import collectives, dispatched
from armillary.parallel.config import Parallel
from armillary.parallel.ledger import Ledger, Traffic
from armillary.parallel.mesh import Mesh
from ranks import run_ranks

CPU = torch.device("cpu")
Pages = dict[str, dict[tuple[str, str], Traffic]]


def pages() -> Pages:
    """One page for each kind of traffic, on two ranks."""
    fsdp = Mesh.create(Parallel(dp_shard=2), CPU)
    tensor = Mesh.create(Parallel(dp_shard=1, tp=2), CPU)
    return {
        "plain": plain(fsdp),
        "functional": functional(fsdp),
        "point to point": point_to_point(Mesh.create(Parallel(dp_shard=1, pp=2), CPU)),
        "own": own(tensor),
        "sharded": sharded(fsdp),
        "steps": steps(fsdp),
        "experts": experts(Mesh.create(Parallel(dp_shard=2, ep=2), CPU)),
        "names": names(tensor),
    }


def plain(mesh: Mesh) -> dict[tuple[str, str], Traffic]:
    group, rank = mesh.group("fsdp"), mesh.coordinate("fsdp")
    x = torch.ones(6)  # 24 bytes
    with Ledger(mesh) as ledger:
        dist.all_reduce(x.clone(), group=group)
        dist.all_gather_into_tensor(torch.empty(12), x, group=group)
        dist.all_gather([torch.empty(6), torch.empty(6)], x, group=group)
        dist.reduce_scatter_tensor(torch.empty(3), x, group=group)
        dist.reduce_scatter_tensor(torch.empty(3).bfloat16(), x.bfloat16(), group=group)
        dist.all_to_all_single(torch.empty(6), x, group=group)
        sent = [5, 1] if rank == 0 else [2, 4]  # rank 0 sends 1 row, rank 1 sends 2
        received = [5, 2] if rank == 0 else [1, 4]
        dist.all_to_all_single(torch.empty(sum(received)), x, received, sent, group=group)
        dist.broadcast(x.clone(), src=0, group=group)
        parts = [torch.empty(6), torch.empty(6)] if rank == 0 else None
        dist.gather(x, parts, dst=0, group=group)
        dist.scatter(x.clone(), [x, x] if rank == 0 else None, src=0, group=group)
        dist.reduce(x.clone(), dst=1, group=group)
        dist.barrier(group=group)
        x @ x  # anything else is nothing
    return ledger.entries()


def functional(mesh: Mesh) -> dict[tuple[str, str], Traffic]:
    import torch.distributed._functional_collectives as functional

    group = mesh.group("fsdp")
    x = torch.ones(6)
    with Ledger(mesh) as ledger:
        functional.all_reduce(x, "sum", group)
        functional.all_gather_tensor(x, 0, group)
        functional.reduce_scatter_tensor(x, "sum", 0, group)
        functional.all_to_all_single(x, None, None, group)
    return ledger.entries()


def point_to_point(mesh: Mesh) -> dict[tuple[str, str], Traffic]:
    x = torch.ones(5, dtype=torch.bfloat16)
    with Ledger(mesh) as ledger:
        if mesh.coordinate("pp") == 0:
            work = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1)])
        else:
            work = dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 0)])
        for each in work:
            each.wait()
    return ledger.entries()


def own(mesh: Mesh) -> dict[tuple[str, str], Traffic]:
    """Operators of `parallel.collectives`: what they call is counted, and in backward too."""
    group = collectives.group_name(mesh.group("tp"))
    x = torch.ones(4, 3, requires_grad=True)  # 48 bytes
    with Ledger(mesh) as ledger:
        y = collectives.all_gather(x, 0, group)
        (y * y).sum().backward()
        collectives.ring_exchange(x.detach(), group)
    assert x.grad is not None and torch.equal(x.grad, torch.full((4, 3), 4.0))
    return ledger.entries()


def sharded(mesh: Mesh) -> dict[tuple[str, str], Traffic]:
    """FSDP of one matrix of 8 x 4, gathered in bfloat16 twice, reduced in float32."""
    model = nn.Sequential(nn.Linear(4, 8, bias=False))
    assert mesh.dense_view is not None
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh.dense_view["fsdp"], mp_policy=policy, reshard_after_forward=True)
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    with Ledger(mesh) as ledger:
        model(torch.ones(2, 4)).sum().backward()
    return ledger.entries()


def steps(mesh: Mesh) -> dict[tuple[str, str], Traffic]:
    """Only the last step is on the page."""
    with Ledger(mesh) as ledger:
        mesh.sum_over(torch.ones(1), ["fsdp"])
        assert ledger.take() == {("fsdp", "all-gather"): Traffic(1, 4)}
        mesh.sum_over(torch.ones(3), ["fsdp"])
        mesh.sum_over(torch.ones(2), ["fsdp"])
    return ledger.entries()


def experts(mesh: Mesh) -> dict[tuple[str, str], Traffic]:
    """fsdp and ep are the same two ranks."""
    group = collectives.group_name(mesh.group("ep"))
    assert group == collectives.group_name(mesh.group("fsdp"))
    with Ledger(mesh) as ledger:
        collectives.all_to_all(torch.ones(3, 2), group, send=[1, 2], receive=[1, 2]) if (
            mesh.coordinate("ep") == 0
        ) else collectives.all_to_all(torch.ones(3, 2), group, send=[2, 1], receive=[2, 1])
        dist.all_reduce(torch.ones(1), group=mesh.group("fsdp"))
    return ledger.entries()


def names(mesh: Mesh) -> dict[tuple[str, str], Traffic]:
    """Groups that are of no axis."""
    alone = [dist.new_group([rank]) for rank in range(2)][mesh.rank]
    again = dist.new_group([0, 1])
    with Ledger(mesh) as ledger:
        dist.all_reduce(torch.ones(1), group=alone)
        dist.all_reduce(torch.ones(1), group=again)
    return ledger.entries()


@pytest.fixture(scope="module")
def ranks() -> list[Pages]:
    return run_ranks(pages, 2)


def booked(page: dict[tuple[str, str], Traffic]) -> dict[str, tuple[int, int]]:
    return {f"{axis} {what}": (t.calls, t.sent_bytes) for (axis, what), t in page.items()}


def test_plain_collectives(ranks: list[Pages]) -> None:
    for rank, seen in enumerate(ranks):
        assert booked(seen["plain"]) == {
            "fsdp all-reduce": (1, 24),
            "fsdp all-gather": (2, 24 + 24),
            "fsdp reduce-scatter": (2, 12 + 6),
            "fsdp broadcast": (1, 24 if rank == 0 else 0),
            "fsdp gather": (1, 0 if rank == 0 else 24),
            "fsdp scatter": (1, 24 if rank == 0 else 0),
            "fsdp reduce": (1, 24 if rank == 0 else 0),
            "fsdp barrier": (1, 0),
            "fsdp all-to-all": (2, 12 + (4 if rank == 0 else 8)),
        }


def test_functional_collectives(ranks: list[Pages]) -> None:
    for seen in ranks:
        assert booked(seen["functional"]) == {
            "fsdp all-reduce": (1, 24),
            "fsdp all-gather": (1, 24),
            "fsdp reduce-scatter": (1, 12),
            "fsdp all-to-all": (1, 12),
        }


def test_point_to_point(ranks: list[Pages]) -> None:
    assert booked(ranks[0]["point to point"]) == {"pp send": (1, 10)}
    assert booked(ranks[1]["point to point"]) == {"pp receive": (1, 0)}


def test_operators_of_our_own_and_their_gradients(ranks: list[Pages]) -> None:
    for seen in ranks:
        assert booked(seen["own"]) == {
            "tp all-gather": (1, 48),
            "tp reduce-scatter": (1, 48),
            "tp receive": (1, 0),
            "tp send": (1, 48),
        }


def test_sharded_weights(ranks: list[Pages]) -> None:
    shard, gradient = 4 * 4 * 2, 8 * 4 * 4  # bytes
    for seen in ranks:
        assert booked(seen["sharded"]) == {
            "fsdp all-gather": (2, 2 * shard),
            "fsdp reduce-scatter": (1, gradient // 2),
        }


def test_a_page_for_each_step(ranks: list[Pages]) -> None:
    for seen in ranks:
        assert booked(seen["steps"]) == {"fsdp all-gather": (2, 12 + 8)}


def test_axes_of_the_same_ranks_are_told_apart_by_use(ranks: list[Pages]) -> None:
    for rank, seen in enumerate(ranks):
        assert booked(seen["experts"]) == {
            "ep all-to-all": (1, 16),
            "fsdp all-reduce": (1, 4),
        }, rank


def test_groups_of_no_axis_are_named_by_where_their_ranks_differ(ranks: list[Pages]) -> None:
    for seen in ranks:
        assert booked(seen["names"]) == {"none all-reduce": (1, 0), "tp all-reduce": (1, 4)}


def test_totals_by_axis_add_up(ranks: list[Pages]) -> None:
    entries: dict[Any, Traffic] = {("a", "x"): Traffic(1, 2), ("a", "y"): Traffic(3, 4)}
    ledger = Ledger(Mesh.create(Parallel(), CPU))
    for key, traffic in entries.items():
        ledger._calls[key], ledger._bytes[key] = traffic.calls, traffic.sent_bytes
    assert ledger.by_axis() == {"a": Traffic(4, 6)}


def test_the_private_parts_of_torch_are_as_expected() -> None:
    """Written for torch 2.11 to 2.13: see `parallel.dispatched`."""
    assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
    for operator, argument in (
        (torch.ops.c10d.allreduce_.default, "tensors"),
        (torch.ops.c10d._allgather_base_.default, "input_tensor"),
        (torch.ops.c10d._reduce_scatter_base_.default, "input_tensor"),
        (torch.ops.c10d.alltoall_base_.default, "input_split_sizes"),
        (torch.ops.c10d.alltoall_base_.default, "input"),
        (torch.ops.c10d.broadcast_.default, "root_rank"),
        (torch.ops._c10d_functional.all_to_all_single.default, "input_split_sizes"),
    ):
        assert argument in [a.name for a in operator._schema.arguments], operator
    assert dispatched.name(torch.ops.c10d.allreduce_.default) == "c10d::allreduce_"
