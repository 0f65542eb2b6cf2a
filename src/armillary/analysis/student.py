"""Student's t distribution: tails, quantiles, and the power of its test. numpy only.

The tail is a regularised incomplete beta function, by the continued fraction of Press et al.,
*Numerical Recipes*, 3rd ed., section 6.4 (equation 6.4.5), evaluated by Lentz's method.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_TINY = 1e-300
_PRECISION = 1e-15
_MOST_TERMS = 10_000
_HALVINGS = 200


def two_sided_p(statistic: float, freedom: float) -> float:
    """Probability that |t| is at least `statistic`, with `freedom` > 0 degrees of freedom."""
    if math.isinf(statistic):
        return 0.0
    return _incomplete_beta(freedom / (freedom + statistic**2), freedom / 2, 0.5)


@lru_cache(maxsize=1_024)
def quantile(probability: float, freedom: float) -> float:
    """The value that t is below with `probability`, in (0, 1)."""
    if probability < 0.5:
        return -quantile(1.0 - probability, freedom)
    tail = 2.0 * (1.0 - probability)
    return _rising_root(lambda t: tail - two_sided_p(t, freedom))


def power(effect: float, freedom: float, alpha: float) -> float:
    """Probability that the two-sided test at `alpha` finds a difference.

    That is the tail of the noncentral t distribution (Cohen 1988, section 2.5), integrated over the
    distribution of the estimated standard error.

    Args:
        effect: the true difference over the true standard error of its estimate; 0 or more.
    """
    critical = quantile(1.0 - alpha / 2.0, freedom)
    # s = estimated over true standard error; freedom * s^2 is chi-squared.
    width = 8.0 / math.sqrt(2.0 * freedom)
    edges = np.linspace(max(0.0, 1.0 - width), 1.0 + width, 401)
    grid = (edges[1:] + edges[:-1]) / 2.0
    log_density = (freedom - 1.0) * np.log(grid) - freedom * grid**2 / 2.0
    weight = np.exp(log_density - log_density.max())
    found = [_upper(critical * s - effect) + _upper(critical * s + effect) for s in grid]
    return float(np.dot(weight, found) / weight.sum())


@lru_cache(maxsize=1_024)
def detectable_effect(freedom: float, alpha: float, wanted_power: float) -> float:
    """The smallest true difference, in standard errors, that is found with `wanted_power`."""
    return _rising_root(lambda effect: power(effect, freedom, alpha) - wanted_power, halvings=30)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """A mean over seeds, and how well it is known."""

    value: float
    count: int
    half_width: float | None
    """Of its 95 % confidence interval, by Student's t; None of a single value."""


def mean_of(values: list[float], confidence: float = 0.95) -> Mean | None:
    """The mean with its interval; None of no values."""
    if not values:
        return None
    count = len(values)
    value = math.fsum(values) / count
    if count == 1:
        return Mean(value=value, count=1, half_width=None)
    error = standard_deviation(values) / math.sqrt(count)
    width = quantile(0.5 + confidence / 2, count - 1) * error
    return Mean(value=value, count=count, half_width=width)


def standard_deviation(values: list[float]) -> float:
    """Of a sample of two or more, with n - 1 below."""
    middle = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1))


def _upper(z: float) -> float:
    """Probability that a standard normal is above z."""
    return 0.5 * math.erfc(z / math.sqrt(2.0))


def _rising_root(function: Callable[[float], float], halvings: int = _HALVINGS) -> float:
    """Where a function that rises from 0 on crosses zero."""
    low, high = 0.0, 1.0
    while function(high) < 0.0:
        low, high = high, high * 2.0
    for _ in range(halvings):
        middle = (low + high) / 2.0
        if not low < middle < high:
            break
        low, high = (middle, high) if function(middle) < 0.0 else (low, middle)
    return high


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b) for x in [0, 1]."""
    if x <= 0.0 or x >= 1.0:
        return min(max(x, 0.0), 1.0)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    log_front += a * math.log(x) + b * math.log1p(-x)
    if x < (a + 1.0) / (a + b + 2.0):
        return math.exp(log_front) * _fraction(x, a, b) / a
    return 1.0 - math.exp(log_front) * _fraction(1.0 - x, b, a) / b


def _fraction(x: float, a: float, b: float) -> float:
    c, d = 1.0, 1.0 / _away_from_zero(1.0 - (a + b) * x / (a + 1.0))
    value = d
    for m in range(1, _MOST_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1.0 / _away_from_zero(1.0 + term * d)
            c = _away_from_zero(1.0 + term / c)
            value *= c * d
        if abs(c * d - 1.0) < _PRECISION:
            break
    return value


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
