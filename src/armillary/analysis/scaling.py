"""Loss against compute: L(C) = E + A (C / C0)^-alpha, fitted to runs of several sizes. numpy only.

The form is that of Kaplan et al. 2020 (arXiv:2001.08361, equation 1.3) with the constant of
Hoffmann et al. 2022 (arXiv:2203.15556, equation 2), in compute alone: each run is taken to have
spent its compute well, which holds for runs with the proportions of size and tokens that one would
use. C0, the geometric mean of the computes, only makes A readable.

For a fixed alpha the rest is linear least squares with E and A not negative, so the fit is a search
over alpha alone: a grid, then finer grids around the best. Intervals are percentiles over bootstrap
samples (Efron & Tibshirani 1993, section 13.3): runs are drawn anew within each size, or, with one
run of each size, residuals are drawn anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from armillary.analysis.curves import Floats

_ALPHAS = np.geomspace(0.005, 3.0, 300)
_ZOOMS, _ZOOM_POINTS = 4, 25
_SAMPLES = 1_000
_AT_ONCE = 50  # samples, so that memory stays small with many runs
_BOOTSTRAP_SEED = 20
FURTHER = 10.0
"""How far beyond the largest compute the curve is read, as a factor."""

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """E + A (C / C0)^-alpha."""

    e: float
    a: float
    alpha: float
    c0: float

    def at(self, compute: Floats | float) -> Floats:
        """The loss that it gives."""
        powers: Floats = np.asarray(compute, dtype=np.float64) / self.c0
        return self.e + self.a * powers**-self.alpha


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingFit:
    """A fit and what is known of it."""

    curve: Curve
    compute: Floats
    """[N] FLOPs of each run."""
    losses: Floats
    """[N]"""
    residuals: Floats
    """[N] loss minus curve."""
    sizes: int
    intervals: dict[str, Interval] | None
    """95 %, of e, a, alpha and `further`, the loss at `FURTHER` times the largest compute; None
    where neither seeds nor residuals can tell."""
    low: Floats | None
    """[len(grid)] lower end of the 95 % interval of the curve at each point of `grid`."""
    high: Floats | None
    grid: Floats
    """Computes from the smallest to `FURTHER` times the largest."""
    remarks: tuple[str, ...]

    @property
    def further(self) -> float:
        """The loss that the curve gives at `FURTHER` times the largest compute."""
        return float(self.curve.at(self.compute.max() * FURTHER))


def fit_scaling(compute: Sequence[float], losses: Sequence[float]) -> ScalingFit:
    """Fits the curve; runs of equal compute are seeds of one size.

    Args:
        compute: FLOPs of each run, above 0; three values or more that differ.
        losses: what each ended with, above 0.
    """
    cs, ys = np.asarray(compute, dtype=np.float64), np.asarray(losses, dtype=np.float64)
    sizes, size_of = np.unique(cs, return_inverse=True)
    assert sizes.size >= 3, "three sizes make a curve"
    c0 = float(np.exp(np.log(sizes).mean()))
    x = np.log(cs / c0)
    curve = Curve(c0=c0, **_as_words(_fit(x, ys[None], np.ones((1, ys.size)))[0]))
    residuals = ys - curve.at(cs)
    samples = _bootstrap(x, ys, residuals, size_of, sizes.size)
    grid = np.geomspace(sizes[0], sizes[-1] * FURTHER, 60)
    intervals = low = high = None
    if samples is not None:
        family = samples[:, :1] + samples[:, 1:2] * np.exp(-samples[:, 2:] * np.log(grid / c0))
        low, high = np.percentile(family, [2.5, 97.5], axis=0)
        ends = np.percentile(samples, [2.5, 97.5], axis=0)
        intervals = {
            name: (float(ends[0, place]), float(ends[1, place]))
            for place, name in enumerate(("e", "a", "alpha"))
        } | {"further": (float(low[-1]), float(high[-1]))}
    return ScalingFit(
        curve=curve,
        compute=cs,
        losses=ys,
        residuals=residuals,
        sizes=int(sizes.size),
        intervals=intervals,
        low=low,
        high=high,
        grid=grid,
        remarks=tuple(_remarks(curve, int(sizes.size), cs, intervals)),
    )


def _as_words(values: Floats) -> dict[str, float]:
    return dict(zip(("e", "a", "alpha"), map(float, values), strict=True))


def _remarks(curve: Curve, sizes: int, cs: Floats, intervals: object) -> list[str]:
    found = []
    if sizes == 3:
        found.append("three sizes and three numbers: the curve cannot be checked by its residuals")
    if curve.e == 0.0:
        found.append("the best E is 0: these runs do not show where the loss levels off")
    if curve.a == 0.0:
        found.append("the loss does not fall with compute over these runs")
    if not _ALPHAS[1] < curve.alpha < _ALPHAS[-2] and curve.a > 0.0:
        found.append("alpha is at the end of what is searched: the curve has hardly any bend")
    if cs.max() / cs.min() < 10.0:
        found.append("the computes span less than a factor of ten: read nothing beyond them")
    if intervals is None:
        found.append("no intervals: they need several seeds of a size, or five sizes or more")
    return found


def _bootstrap(
    x: Floats, ys: Floats, residuals: Floats, size_of: np.ndarray, sizes: int
) -> Floats | None:
    """[samples, 3] of e, a, alpha."""
    draw = np.random.default_rng(_BOOTSTRAP_SEED)
    counts = np.bincount(size_of)
    if counts.min() >= 2:
        weights = np.zeros((_SAMPLES, ys.size))
        for size in range(sizes):
            members = np.flatnonzero(size_of == size)
            shares = np.full(members.size, 1.0 / members.size)
            weights[:, members] = draw.multinomial(members.size, shares, size=_SAMPLES)
        return _fit(x, np.repeat(ys[None], _SAMPLES, axis=0), weights)
    if sizes >= 5:
        spread = residuals * np.sqrt(ys.size / (ys.size - 3.0))  # three numbers were fitted
        drawn = (ys - residuals) + draw.choice(spread, size=(_SAMPLES, ys.size))
        return _fit(x, drawn, np.ones((_SAMPLES, ys.size)))
    return None


def _fit(x: Floats, ys: Floats, weights: Floats) -> Floats:
    """The best e, a, alpha of each sample.

    Args:
        x: [N] log of the computes over C0.
        ys: [B, N] losses.
        weights: [B, N] how often each counts.

    Returns:
        [B, 3].
    """
    parts = [slice(first, first + _AT_ONCE) for first in range(0, ys.shape[0], _AT_ONCE)]
    return np.concatenate([_fit_part(x, ys[part], weights[part]) for part in parts])


def _fit_part(x: Floats, ys: Floats, weights: Floats) -> Floats:
    alphas = np.broadcast_to(_ALPHAS, (ys.shape[0], _ALPHAS.size))
    for zoom in range(_ZOOMS + 1):
        e, a, error = _linear(x, ys, weights, alphas)
        rows = np.arange(ys.shape[0])
        best = error.argmin(axis=1)
        if zoom < _ZOOMS:
            low = alphas[rows, np.maximum(best - 1, 0)]
            high = alphas[rows, np.minimum(best + 1, alphas.shape[1] - 1)]
            alphas = np.linspace(low, high, _ZOOM_POINTS, axis=1)
    return np.stack([e[rows, best], a[rows, best], alphas[rows, best]], axis=1)


def _linear(
    x: Floats, ys: Floats, weights: Floats, alphas: Floats
) -> tuple[Floats, Floats, Floats]:
    """Weighted least squares of y = e + a p with p = exp(-alpha x); e, a >= 0. Each is [B, K]."""
    powers = np.exp(-alphas[:, :, None] * x)  # [B, K, N]
    w, y = weights[:, None, :], ys[:, None, :]
    total = w.sum(axis=2)
    p_mean, y_mean = (w * powers).sum(axis=2) / total, (w * y).sum(axis=2) / total
    p_off, y_off = powers - p_mean[:, :, None], y - y_mean[:, :, None]
    scatter = (w * p_off**2).sum(axis=2)
    a = np.where(scatter > 0.0, (w * p_off * y_off).sum(axis=2), 0.0)
    a = np.maximum(a / np.where(scatter > 0.0, scatter, 1.0), 0.0)
    e = y_mean - a * p_mean
    through_zero = (w * powers * y).sum(axis=2) / (w * powers**2).sum(axis=2)
    a, e = np.where(e < 0.0, through_zero, a), np.maximum(e, 0.0)
    error = (w * (y - e[:, :, None] - a[:, :, None] * powers) ** 2).sum(axis=2)
    return e, a, error
