"""Where ranks stand: groups that partition, axes that nest, two arrangements of the same ranks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.parallel.grid import AXES, DENSE_AXES, DENSE_VIEW, EXPERT_AXES, EXPERT_VIEW, Grid

degree = st.sampled_from([1, 2, 3, 4])


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    pp, dp_replicate, dp_shard, cp, tp = (draw(degree) for _ in range(5))
    expert_tp = draw(st.sampled_from([1, tp]))
    room = dp_shard * cp * tp // expert_tp
    ep = draw(st.sampled_from([each for each in range(1, room + 1) if room % each == 0]))
    return Grid(
        pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp, ep=ep,
        expert_tp=expert_tp,
    )  # fmt: skip


@given(grids())
def test_every_rank_is_in_one_group_of_each_axis(grid: Grid) -> None:
    for axis in AXES:
        groups = grid.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
        for group in groups:
            assert list(group) == sorted(group) and len(group) == grid.degree(axis)
            for place, rank in enumerate(group):
                assert grid.members(rank, axis) == group
                assert grid.coordinate(rank, axis) == place


@given(grids(), st.sampled_from([DENSE_AXES, EXPERT_AXES, DENSE_VIEW, EXPERT_VIEW]))
def test_the_coordinates_of_an_arrangement_name_one_rank(grid: Grid, axes: tuple[str, ...]) -> None:
    def place(rank: int) -> tuple[int, ...]:
        return tuple(grid.coordinate(rank, axis) for axis in axes)

    places = [place(rank) for rank in range(grid.world_size)]
    assert sorted(places) == list(itertools.product(*(range(grid.degree(a)) for a in axes)))
    if axes in (DENSE_AXES, EXPERT_AXES):
        assert places == sorted(places)  # the first axis is the slowest


@given(grids())
def test_fsdp_is_dp_shard_and_cp_together_and_rows_belong_to_data_ranks(grid: Grid) -> None:
    for rank in range(grid.world_size):
        shard, part = grid.coordinate(rank, "dp_shard"), grid.coordinate(rank, "cp")
        assert grid.coordinate(rank, "fsdp") == shard * grid.cp + part
        for axis in ("pp", "cp", "tp"):
            assert {grid.data_rank(other) for other in grid.members(rank, axis)} == {
                grid.data_rank(rank)
            }
    data = {grid.data_rank(rank) for rank in range(grid.world_size)}
    assert data == set(range(grid.data_size))


def test_neighbours_in_tp_are_neighbours_in_number() -> None:
    grid = Grid(pp=2, dp_shard=2, cp=2, tp=2, ep=4, expert_tp=1)
    groups = {axis: grid.members(9, axis) for axis in AXES}
    assert groups == {
        "pp": (1, 9),
        "dp_replicate": (9,),
        "dp_shard": (9, 13),
        "cp": (9, 11),
        "tp": (8, 9),
        "fsdp": (9, 11, 13, 15),
        "expert_fsdp": (9, 13),
        "ep": (8, 9, 10, 11),
        "expert_tp": (9,),
    }
    assert grid.axes == {
        "pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 2, "tp": 2, "ep": 4, "expert_tp": 1,
    }  # fmt: skip


def test_experts_cover_the_ranks_of_dp_shard_cp_and_tp() -> None:
    with pytest.raises(AssertionError):
        Grid(dp_shard=2, tp=2, ep=3)
    with pytest.raises(AssertionError):
        Grid(dp_shard=2, ep=2, expert_tp=2)
