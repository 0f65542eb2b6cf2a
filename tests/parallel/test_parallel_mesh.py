"""The mesh on real and on pretended ranks: groups, views, sums, refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Shard

from armillary.foundation.errors import UserError
from armillary.parallel import Parallel, groups
from armillary.parallel.grid import AXES, DENSE_VIEW, EXPERT_VIEW, Grid
from armillary.parallel.mesh import Mesh
from armillary.parallel.pretended import pretended
from ranks import run_ranks

CPU = torch.device("cpu")

ON_EIGHT = [
    Parallel(),
    Parallel(dp_replicate=2, tp=2),
    Parallel(pp=2, tp=2),
    Parallel(cp=2, tp=2, ep=4),
    Parallel(pp=2, cp=2, ep=2),
    Parallel(tp=2, ep=2, expert_tp=2),
    Parallel(dp_replicate=2, ep=4),
    Parallel(pp=2, dp_replicate=2, dp_shard=1, tp=2, ep=2),
]

BAD = [
    Parallel(tp=3),
    Parallel(pp=2, dp_shard=2),
    Parallel(ep=3),
    Parallel(tp=2, expert_tp=4),
    Parallel(pp=2, schedule="none"),
    Parallel(pp=2, stages_per_rank=2),
]


def on_eight_ranks() -> list[Any]:
    """On one rank: for each mesh, what depends on it and on nothing else."""
    seen: list[Any] = []
    for parallel in BAD:
        with pytest.raises(UserError) as refusal:
            Mesh.create(parallel, CPU)
        seen.append(str(refusal.value))
    assert groups._made.groups == {}
    for parallel in ON_EIGHT:
        mesh = Mesh.create(parallel, CPU)
        rank = dist.get_rank()
        assert (mesh.rank, mesh.is_main) == (rank, rank == 0)
        grid = mesh.grid
        for axis in AXES:
            group = mesh.group(axis)
            assert (group is None) == (grid.degree(axis) == 1)
            if group is not None:
                assert tuple(dist.get_process_group_ranks(group)) == grid.members(rank, axis)
        own = torch.tensor([0.1 * (rank + 1), 1e8 * (rank - 3)], dtype=torch.float32)
        sums = [mesh.sum_over(own, axes) for axes in (("dp_replicate", "fsdp"), ("tp", "pp"))]
        everywhere = mesh.sum_over(own, ("pp", "dp_replicate", "dp_shard", "cp", "tp"))
        assert own[0] == torch.tensor(0.1 * (rank + 1))
        counted = mesh.sum_over(torch.tensor([2**40, 1]), ("expert_fsdp", "ep", "expert_tp"))
        inner = grid.dp_shard * grid.cp * grid.tp
        assert counted.tolist() == [inner * 2**40, inner]
        assert cut_left_to_right(mesh)
        seen.append((mesh.axes, everywhere.tolist()))
        for each, axes in zip(sums, (("dp_replicate", "fsdp"), ("tp", "pp")), strict=True):
            wanted = sum(0.1 * (other + 1) for other in partners(grid, rank, axes))
            assert float(each[0]) == pytest.approx(wanted, rel=1e-6)
    return seen


def partners(grid: Grid, rank: int, axes: tuple[str, ...]) -> set[int]:
    found = {rank}
    for axis in axes:
        found = {other for each in found for other in grid.members(each, axis)}
    return found


def cut_left_to_right(mesh: Mesh) -> bool:
    """Whether a DTensor over a view, cut by each axis in turn, comes together again in order."""
    assert mesh.dense_view is not None and mesh.expert_view is not None
    whole = torch.arange(48.0).view(16, 3)
    for view, axes in (
        (mesh.dense_view, ("tp", "fsdp")),
        (mesh.expert_view, ("ep", "expert_tp", "expert_fsdp")),
    ):
        local = whole
        for axis in axes:
            local = local.chunk(mesh.degree(axis))[mesh.coordinate(axis)]
        spread = DTensor.from_local(
            local, view[axes], [Shard(0)] * len(axes), shape=whole.shape, stride=whole.stride()
        )
        if not torch.equal(spread.full_tensor(), whole):
            return False
    return True


def test_eight_ranks_agree_on_groups_sums_views_and_refusals() -> None:
    first, *others = run_ranks(on_eight_ranks, 8)
    assert all(other == first for other in others)  # refusals and sums to the last bit
    assert all(text.startswith("error: parallel.") for text in first[: len(BAD)])


def worlds() -> st.SearchStrategy[tuple[Parallel, int, int]]:
    degree = st.sampled_from([1, 1, 2, 2, 3, 4, 8])
    parallels = st.builds(
        Parallel, pp=degree, dp_replicate=degree, dp_shard=st.sampled_from([-1, 1, 2, 4, 8]),
        cp=degree, tp=degree, ep=st.sampled_from([1, 2, 3, 4, 8]),
        expert_tp=st.sampled_from([1, 1, 2, 3]),
        schedule=st.sampled_from(["GPipe", "1F1B", "Interleaved1F1B", "DualPipeV", "2F2B"]),
        stages_per_rank=st.sampled_from([0, 0, 1, 2, 3]),
    )  # fmt: skip
    sizes = st.sampled_from([1, 2, 4, 6, 8, 16, 24, 64, 96, 128])
    return st.tuples(parallels, sizes, st.integers(0, 127))


@settings(max_examples=60)
@given(worlds())
@example((Parallel(pp=8, tp=8), 512, 511))
@example((Parallel(pp=16, ep=64), 1024, 700))
def test_a_mesh_without_problems_can_be_made_and_one_with_problems_makes_no_group(
    case: tuple[Parallel, int, int],
) -> None:
    parallel, world_size, number = case
    rank = number % world_size
    with pretended(world_size, rank):
        if parallel.problems(world_size):
            with pytest.raises(UserError) as refusal:
                Mesh.create(parallel, CPU)
            assert refusal.value.problems == parallel.problems(world_size)
            assert groups._made.groups == {}
            return
        mesh = Mesh.create(parallel, CPU)
        for view, axes in ((mesh.dense_view, DENSE_VIEW), (mesh.expert_view, EXPERT_VIEW)):
            assert view is not None and view.mesh_dim_names == axes
            assert view.get_coordinate() == tuple(mesh.coordinate(axis) for axis in axes)
            for axis in axes:
                assert view.get_local_rank(axis) == mesh.coordinate(axis)
                ranks = tuple(dist.get_process_group_ranks(view.get_group(axis)))
                assert ranks == mesh.grid.members(rank, axis)
        imagined = Mesh.imagined(parallel, world_size, rank)
        assert (imagined.axes, imagined.data_rank) == (mesh.axes, mesh.data_rank)
        assert imagined.group("fsdp") is None and imagined.dense_view is None
    assert groups._made.groups == {}


def test_groups_of_the_same_ranks_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    new_group = dist.new_group

    def counted(ranks: list[int], *args: Any, **keywords: Any) -> Any:
        made.append(tuple(ranks))
        return new_group(ranks, *args, **keywords)

    monkeypatch.setattr(dist, "new_group", counted)
    with pretended(8, 5):
        mesh = Mesh.create(Parallel(tp=2), CPU)
        assert (5,) in made and len(made) == len(set(made))
        assert [ranks for ranks in made if 5 in ranks] == [(1, 3, 5, 7), (4, 5), (5,)]
        first = len(made)
        again = Mesh.create(Parallel(dp_replicate=4, dp_shard=1, tp=2), CPU)
        assert len(made) == first  # copies stand where shards stood
        assert again.group("dp_replicate") is mesh.group("fsdp")
    with pretended(8, 5):
        Mesh.create(Parallel(tp=2), CPU)
        assert len(made) == 2 * first


@pytest.mark.parametrize("torch_splits_backends", [True, False])
def test_gpus_split_off_their_own_backend_only_where_torch_can(
    torch_splits_backends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []

    def as_of_now(  # noqa: PLR0917 - torch's own
        parent_pg: Any = None, split_ranks: Any = None, timeout: Any = None,
        pg_options: Any = None, group_desc: Any = None, backend: Any = None,
    ) -> str:  # fmt: skip
        calls.append({"ranks": split_ranks, "backend": backend})
        return "a group"

    def as_before(split_ranks: Any = None, timeout: Any = None, group_desc: Any = None) -> str:
        calls.append({"ranks": split_ranks})
        return "a group"

    monkeypatch.setattr(dist, "split_group", as_of_now if torch_splits_backends else as_before)
    world: Any = SimpleNamespace(bound_device_id=CPU)
    assert groups._new(Parallel(tp=2, dp_shard=2).grid, "tp", (2, 3), world) == "a group"
    (call,) = calls
    assert call["ranks"] == [[0, 1], [2, 3]]
    assert call.get("backend") == ("cuda:nccl" if torch_splits_backends else None)


def test_one_process_is_a_mesh_without_groups() -> None:
    mesh = Mesh.create(Parallel(), CPU)
    assert set(mesh.axes.values()) == {1} and (mesh.data_rank, mesh.data_size) == (0, 1)
    assert mesh.is_main and mesh.dense_view is None and mesh.group("tp") is None
    number = torch.tensor(3.0)
    total = mesh.sum_over(number, ("dp_shard",))
    assert total == 3.0 and total is not number


def test_the_pretended_group_was_tried_on_this_torch() -> None:
    assert torch.__version__.split(".")[:2] in (["2", "11"], ["2", "12"], ["2", "13"])
