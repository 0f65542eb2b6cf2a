"""The t distribution, the tests, and what they let be said."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.analysis.significance import (
    ALPHA,
    compare_groups,
    compare_pair,
    fisher_exact,
    holm,
)
from armillary.analysis.student import (
    detectable_effect,
    mean_of,
    power,
    quantile,
    two_sided_p,
)

TABLE = [(1, 12.7062), (2, 4.30265), (4, 2.77645), (10, 2.22814), (30, 2.04227), (1000, 1.96234)]
"""Upper 2.5 % points of t, as in any table of it."""


@pytest.mark.parametrize(("freedom", "critical"), TABLE)
def test_quantiles_are_those_of_the_printed_table(freedom: int, critical: float) -> None:
    assert quantile(0.975, freedom) == pytest.approx(critical, rel=3e-6)
    assert quantile(0.025, freedom) == -quantile(0.975, freedom)
    assert two_sided_p(critical, freedom) == pytest.approx(0.05, rel=1e-4)


@given(st.floats(1.0, 200.0), st.floats(0.0, 30.0))
def test_the_tail_is_the_integral_of_the_density(freedom: float, statistic: float) -> None:
    """Over angles: t = sqrt(freedom) tan(u) turns the density into a power of the cosine."""
    edges = np.linspace(math.atan(statistic / math.sqrt(freedom)), math.pi / 2, 20_001)
    middles = (edges[1:] + edges[:-1]) / 2
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(math.pi) / 2
    densities = np.exp(log_scale + (freedom - 1) * np.log(np.cos(middles)))
    tail = 2 * float(densities.sum()) * (edges[1] - edges[0])
    assert two_sided_p(statistic, freedom) == pytest.approx(tail, rel=2e-3, abs=1e-12)


def test_the_power_of_no_effect_is_the_level_and_a_detectable_effect_is_found_so_often() -> None:
    for freedom in (1, 2, 4, 20):
        assert power(0.0, freedom, 0.05) == pytest.approx(0.05, rel=2e-3)
        effect = detectable_effect(freedom, 0.05, 0.8)
        drawn = np.random.default_rng(0)
        count = 200_000
        z = drawn.normal(effect, 1.0, count)
        s = np.sqrt(drawn.chisquare(freedom, count) / freedom)
        found = np.mean(np.abs(z / s) > quantile(0.975, freedom))
        assert found == pytest.approx(0.8, abs=0.005)


@pytest.mark.parametrize("paired", [True, False])
def test_one_recipe_is_called_different_from_itself_in_one_of_twenty(paired: bool) -> None:
    drawn = np.random.default_rng(1)
    called = 0
    for _ in range(2_000):
        one, other = drawn.normal(3.0, 0.1, 3), drawn.normal(3.0, 0.1, 3)
        shift = 0 if paired else 3
        pair = compare_pair("A", dict(enumerate(one)), "B", dict(enumerate(other, shift)))
        assert pair.test == ("paired t" if paired else "Welch t")
        assert pair.p is not None
        called += pair.p <= ALPHA
    assert 0.025 < called / 2_000 < 0.065


def test_welch_agrees_with_a_worked_example() -> None:
    """Two samples of unequal scatter, worked by hand: t = -1.5 / sqrt(1/3 + 4/3)."""
    pair = compare_pair("A", {0: 1.0, 1: 2.0, 2: 3.0}, "B", {7: 1.5, 8: 3.5, 9: 5.5})
    assert pair.standard_error == pytest.approx(math.sqrt(5 / 3))
    assert pair.freedom == pytest.approx((5 / 3) ** 2 / (1 / 18 + 16 / 18))
    assert pair.difference == pytest.approx(-1.5)
    assert pair.interval is not None
    assert sum(pair.interval) / 2 == pytest.approx(-1.5)


def test_pairing_by_seed_finds_what_the_scatter_of_seeds_would_hide() -> None:
    seeds = {0: 3.00, 1: 3.20, 2: 2.90, 3: 3.10}
    better = {seed: loss - 0.02 - 0.001 * seed for seed, loss in seeds.items()}
    pair = compare_groups({"A": seeds, "B": better})[0]
    assert pair.test == "paired t"
    assert pair.significant
    unpaired = {seed + 10: loss for seed, loss in better.items()}
    assert not compare_groups({"A": seeds, "B": unpaired})[0].significant


def test_one_seed_cannot_tell() -> None:
    pair = compare_groups({"A": {0: 3.0}, "B": {0: 2.0}})[0]
    assert pair.significant is None
    assert "one seed" in pair.reason


def test_equal_runs_are_no_difference_and_rounding_is_none_either() -> None:
    same = {0: 3.0, 1: 3.5, 2: 2.5}
    nearly = {seed: loss * (1 + 1e-9) for seed, loss in same.items()}
    for other in (same, nearly):
        pair = compare_groups({"A": same, "B": other})[0]
        assert pair.significant is False
        assert pair.p is not None
        assert pair.p > 0.9


def test_runs_without_a_result_are_counted_and_the_rest_is_not_tested() -> None:
    good = {seed: 3.0 + 0.01 * seed for seed in range(5)}
    bad: dict[int, float | None] = dict.fromkeys(range(5)) | {0: 1.0}
    pair = compare_groups({"A": good, "B": bad})[0]
    assert pair.test == "Fisher exact"
    assert pair.interval is None
    assert "0 of 5 and 4 of 5" in pair.reason
    assert pair.p == pytest.approx(12 / 252)  # 2 * C(5,4) C(5,0) + 2 * C(5,1) ... of the margins


def test_a_run_that_is_not_finished_is_no_failure() -> None:
    good = {seed: 3.0 + 0.01 * seed for seed in range(5)}
    going: dict[int, float | None] = dict.fromkeys(range(5))
    pair = compare_groups({"A": good, "B": going}, {"B": 5})[0]
    assert pair.test == "none"
    assert pair.significant is None
    assert "5 runs are not finished" in pair.reason


def test_fishers_test_agrees_with_the_lady_who_tasted_tea() -> None:
    assert fisher_exact(3, 1, 1, 3) == pytest.approx(34 / 70)
    assert fisher_exact(4, 0, 0, 4) == pytest.approx(2 / 70)


def test_holm_agrees_with_its_definition_and_keeps_order() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=9))
def test_holm_lies_between_no_correction_and_bonferroni(values: list[float]) -> None:
    for value, adjusted in zip(values, holm(values), strict=True):
        assert value <= adjusted <= min(1.0, max(value * len(values), max(values) * 1.0)) + 1e-12


def test_an_interval_needs_two_values() -> None:
    alone = mean_of([2.0])
    assert alone is not None
    assert alone.half_width is None
    two = mean_of([1.0, 3.0])
    assert two is not None
    assert two.half_width == pytest.approx(12.7062, rel=1e-5)
    assert mean_of([]) is None
