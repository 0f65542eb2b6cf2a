"""Sweeps, from what is typed to points."""

from __future__ import annotations

import pytest

from armillary.analysis.sweep import expand, parse_axis
from armillary.foundation.errors import UserError


def test_a_grid_has_every_combination() -> None:
    axes = [parse_axis("optimizer.lr=1e-3,1e-2"), parse_axis("model.n-layers=2,4,6")]
    points = expand(axes, draws=None)
    assert len(points) == 6
    assert points[0] == (("optimizer.lr", "1e-3"), ("model.n_layers", "2"))


def test_values_with_commas_are_separated_by_semicolons() -> None:
    assert parse_axis("optimizer.betas=0.9,0.95;0.9,0.99").values == ("0.9,0.95", "0.9,0.99")


def test_a_range_with_a_count_has_both_ends_and_even_steps() -> None:
    assert parse_axis("optimizer.lr~log:1e-4:1e-2:3").values == ("0.0001", "0.001", "0.01")
    assert parse_axis("model.n_layers~linear:2:6:3").values == ("2", "4", "6")


def test_random_points_lie_within_and_are_the_same_each_time() -> None:
    axes = [parse_axis("optimizer.lr~log:1e-4:1e-2"), parse_axis("model.dim=32,64")]
    points = expand(axes, draws=20)
    assert points == expand(axes, draws=20)
    assert len(set(points)) == 20
    rates = [float(dict(point)["optimizer.lr"]) for point in points]
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)
    assert sum(rate < 1e-3 for rate in rates) in range(4, 17)  # evenly in the logarithm


def test_a_small_grid_gives_no_point_twice() -> None:
    assert len(expand([parse_axis("seed=1,2,3")], draws=10)) == 3


@pytest.mark.parametrize(
    "text",
    ["lr", "=1,2", "lr=1,,2", "lr~log:0:1", "lr~log:1:1", "lr~what:1:2", "lr~log:a:b",
     "lr~log:1:2:1", "lr~log:1:inf"],
)  # fmt: skip
def test_what_is_no_sweep_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse_axis(text)


def test_a_grid_of_a_range_and_a_leaf_twice_are_refused() -> None:
    with pytest.raises(UserError, match="count"):
        expand([parse_axis("lr~log:1e-4:1e-2")], draws=None)
    with pytest.raises(UserError, match="twice"):
        expand([parse_axis("lr=1"), parse_axis("lr=2")], draws=None)
    with pytest.raises(UserError, match="points"):
        expand([parse_axis(f"a{n}={','.join(map(str, range(20)))}") for n in range(3)], draws=None)
