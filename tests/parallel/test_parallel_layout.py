"""Layouts: parts as torch.chunk cuts them, wholes as DTensors, every element counted once."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from armillary.parallel.config import Parallel
from armillary.parallel.execution import InTurn
from armillary.parallel.grid import Grid
from armillary.parallel.layout import (
    Layout,
    Layouts,
    RankPlace,
    counts_here,
    local_ranges,
    local_shape,
    split_parameter,
)
from armillary.parallel.mesh import Mesh
from armillary.parallel.model import ParallelModel, WholeModel
from ranks import run_ranks


@settings(deadline=None, max_examples=60)
@given(
    st.tuples(st.integers(0, 9), st.integers(1, 9)),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([(0, 0), (0, 1), (1, 0), (1, 1)]),
)
def test_nested_cuts_are_those_of_torch_chunk(
    shape: tuple[int, int], tp: int, shards: int, dims: tuple[int, int]
) -> None:
    layout = Layout(shape).split("tp", dims[0]).split("fsdp", dims[1])
    grid = Grid(tp=tp, dp_shard=shards)
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    for rank in range(grid.world_size):
        place = RankPlace(grid, rank)
        expected = whole
        for degree, dim, axis in ((tp, dims[0], "tp"), (shards, dims[1], "fsdp")):
            chunks = expected.chunk(degree, dim)
            position = place.coordinate(axis)
            if position < len(chunks):
                expected = chunks[position]
            else:  # torch.chunk leaves the empty ones out
                expected = expected.narrow(dim, expected.shape[dim], 0)
        own = tuple(slice(*indices) for indices in local_ranges(layout, place))
        assert torch.equal(whole[own], expected)
        assert local_shape(layout, place) == tuple(expected.shape)


LAYOUTS = {
    "whole": Layout((5, 3)),
    "by tp": Layout((5, 3)).split("tp", 0),
    "twice along one dim": Layout((5, 3)).split("tp", 0).split("fsdp", 0),
    "along two dims": Layout((5, 3)).split("tp", 1).split("fsdp", 0),
    "fewer rows than ranks": Layout((1, 3)).split("tp", 0).split("fsdp", 0),
    "experts": Layout((5, 4, 3)).split("ep", 0).split("expert_fsdp", 1),
    "experts cut twice": Layout((3, 4, 3)).split("ep", 0).split("expert_fsdp", 0),
    "experts in three": Layout((5, 3, 4)).split("ep", 0).split("expert_tp", 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_element_is_counted_by_exactly_one_rank(name: str) -> None:
    layout = LAYOUTS[name]
    for grid in (
        Grid(dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=4, expert_tp=2),
        Grid(dp_shard=3, tp=2, ep=2),
        Grid(dp_shard=2, cp=2, ep=4),
    ):
        count = torch.zeros(layout.shape, dtype=torch.int64)
        for place in (RankPlace(grid, rank) for rank in range(grid.world_size)):
            if counts_here(layout, place):
                count[tuple(slice(*indices) for indices in local_ranges(layout, place))] += 1
        assert torch.equal(count, torch.ones_like(count)), grid


def views() -> list[str]:
    """On 4 ranks: what differs between our idea of a whole tensor and torch's."""
    wrong = []
    for parallel in (
        Parallel(tp=2, ep=2),
        Parallel(tp=2, ep=2, expert_tp=2),
        Parallel(dp_replicate=2, ep=2),
        Parallel(tp=4, ep=1),
        Parallel(ep=4),
    ):
        mesh = Mesh.create(parallel, torch.device("cpu"))
        layouts = Layouts()
        layouts.update(LAYOUTS)
        model = ParallelModel(
            [],
            layouts=layouts,
            mesh=mesh,
            whole=WholeModel(shapes={}, initializers={}, max_seq_len=0),
            executor=InTurn(nn.Module(), mesh),
        )
        for name, layout in LAYOUTS.items():
            whole = torch.randn(layout.shape, generator=torch.Generator().manual_seed(3))
            local = model.own_part(name, whole).clone()
            view = model.whole_view(name, local)
            here = f"{name} on {parallel}"
            if isinstance(view, DTensor):
                shape, offset = compute_local_shape_and_global_offset(
                    view.shape, view.device_mesh, view.placements
                )
                ranges = local_ranges(layout, mesh)
                starts = tuple(start for start, _ in ranges)
                if shape != local_shape(layout, mesh) or (local.numel() and offset != starts):
                    wrong.append(f"{here}: {shape} at {offset}, not {ranges}")
                if view.to_local().untyped_storage().data_ptr() != local.data_ptr():
                    wrong.append(f"{here}: copied")
                if not torch.equal(view.full_tensor(), whole):
                    wrong.append(f"{here}: gathered wrongly by torch")
            if not torch.equal(model.gather(name, local), whole):
                wrong.append(f"{here}: gathered wrongly")
            matrices = model.gather(name, local, stacked=True)
            start, end = local_ranges(layout, mesh)[0]
            if not torch.equal(matrices, whole[start:end]):
                wrong.append(f"{here}: not the matrices that are here")
            if not torch.equal(model.own_part(name, matrices, stacked=True), local):
                wrong.append(f"{here}: not the own part of them")
    return wrong


def test_views_of_uneven_and_empty_parts_are_what_torch_understands() -> None:
    assert torch.__version__.split(".")[:2] in (["2", "11"], ["2", "12"], ["2", "13"])
    assert run_ranks(views, 4) == [[]] * 4


class Tied(nn.Module):
    """Two modules that share a weight, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(6, 7, bias=False, device="meta") for _ in range(2))
        self.third = nn.Linear(7, 6, device="meta")
        self.second.weight = self.first.weight


def test_a_weight_that_two_modules_share_is_cut_once_and_stays_shared() -> None:
    model = Tied()
    layouts = Layouts.of(model)
    assert layouts.aliases == {"second.weight": "first.weight"}
    mesh = Mesh.imagined(Parallel(tp=2), 4, 3)
    for name in ("first", "second"):
        module = model.get_submodule(name)
        split_parameter(module, "weight", f"{name}.weight", layouts, mesh, axis="tp", dim=0)
    split_parameter(model.third, "weight", "third.weight", layouts, mesh, axis="tp", dim=1)
    assert model.first.weight is model.second.weight
    assert tuple(model.first.weight.shape) == (3, 6)
    assert layouts.layout("second.weight") == Layout((7, 6), (("tp", 0),))
    assert tuple(model.third.weight.shape) == (6, 3)
    split_parameter(model.third, "bias", "third.bias", layouts, mesh, axis="ep", dim=0)
    assert layouts["third.bias"].splits == (), "one rank cuts nothing"


def test_cuts_that_torch_could_not_undo_from_left_to_right_are_refused() -> None:
    with pytest.raises(AssertionError, match="not in the order"):
        Layout((4,)).split("fsdp", 0).split("tp", 0)
    assert Layout((4,)).split("ep", 0).view == "expert"
    assert all(a.split(*cut) == a for a, _ in pairwise(LAYOUTS.values()) for cut in a.splits), (
        "a cut that is recorded again changes nothing"
    )
