"""Fits of loss against compute, on data whose law is known."""

from __future__ import annotations

import numpy as np
import pytest

from armillary.analysis.scaling import fit_scaling

SIZES = np.geomspace(1e15, 1e19, 6)
TRUE = {"e": 1.7, "a": 0.5, "alpha": 0.15}


def law(compute: np.ndarray) -> np.ndarray:
    return TRUE["e"] + TRUE["a"] * (compute / 1e17) ** -TRUE["alpha"]


def test_a_law_without_noise_is_found() -> None:
    fit = fit_scaling(SIZES.tolist(), law(SIZES).tolist())
    assert fit.curve.e == pytest.approx(TRUE["e"], rel=1e-5)
    assert fit.curve.a == pytest.approx(TRUE["a"], rel=1e-5)
    assert fit.curve.alpha == pytest.approx(TRUE["alpha"], rel=1e-5)
    assert abs(fit.residuals).max() < 1e-6
    assert fit.remarks == ()


def test_intervals_over_seeds_hold_the_truth_most_of_the_time() -> None:
    held = 0
    for repeat in range(10):
        drawn = np.random.default_rng(repeat)
        compute = np.repeat(SIZES, 5)
        losses = law(compute) + drawn.normal(0.0, 0.01, compute.size)
        intervals = fit_scaling(compute.tolist(), losses.tolist()).intervals
        assert intervals is not None
        held += all(intervals[name][0] <= TRUE[name] <= intervals[name][1] for name in TRUE)
    assert held >= 6  # 95 % each; percentiles over five seeds are a little narrow


def test_three_sizes_are_fitted_and_it_is_said_that_nothing_is_left_to_check() -> None:
    fit = fit_scaling(SIZES[:3].tolist(), law(SIZES[:3]).tolist())
    assert abs(fit.residuals).max() < 1e-6
    assert fit.intervals is None
    assert any("three sizes" in remark for remark in fit.remarks)
    assert any("no intervals" in remark for remark in fit.remarks)


def test_one_run_of_each_size_takes_its_intervals_from_residuals() -> None:
    drawn = np.random.default_rng(3)
    losses = law(SIZES) + drawn.normal(0.0, 0.01, SIZES.size)
    fit = fit_scaling(SIZES.tolist(), losses.tolist())
    assert fit.intervals is not None
    assert fit.low is not None and fit.high is not None
    assert (fit.low <= fit.high).all()
    assert fit.intervals["further"][0] <= fit.further <= fit.intervals["further"][1]


def test_losses_that_do_not_fall_are_not_given_a_slope() -> None:
    fit = fit_scaling([1e15, 1e16, 1e17, 1e18], [2.0, 2.1, 2.2, 2.3])
    assert fit.curve.a == 0.0
    assert any("does not fall" in remark for remark in fit.remarks)


def test_a_law_through_zero_never_has_a_negative_end() -> None:
    compute = np.geomspace(1e15, 1e18, 5)
    fit = fit_scaling(compute.tolist(), (3.0 * (compute / 1e15) ** -0.1).tolist())
    assert fit.curve.e == pytest.approx(0.0, abs=1e-3)
    assert fit.curve.alpha == pytest.approx(0.1, rel=1e-2)
