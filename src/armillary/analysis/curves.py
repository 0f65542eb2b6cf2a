"""Curves of runs: smoothed, read at any point, and put together over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armillary.analysis.student import quantile

Floats = NDArray[np.float64]

AXES = ("tokens", "flops", "seconds")
"""What a curve may be drawn against; FLOPs are tokens times FLOPs per token."""

SMOOTHING = 0.05
"""Share of a run's tokens over which the training loss is averaged, backwards from each point."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A figure of one run as it went on."""

    tokens: Floats
    """[N], rising."""
    flops: Floats
    seconds: Floats
    """Of the steps alone: no looks at held-out text, no start."""
    values: Floats
    """[N]; NaN where there is none."""

    def end(self, axis: str) -> float | None:
        """The last point of an axis with a value; None of an empty curve."""
        known = self._known(axis)[0]
        return float(known[-1]) if known.size else None

    def begin(self, axis: str) -> float | None:
        """The first point of an axis with a value; None of an empty curve."""
        known = self._known(axis)[0]
        return float(known[0]) if known.size else None

    def at(self, axis: str, points: Sequence[float] | Floats) -> Floats:
        """Values between the points there are, in straight lines; NaN outside of them."""
        xs, values = self._known(axis)
        wanted = np.asarray(points, dtype=np.float64)
        if not xs.size:
            return np.full(wanted.shape, np.nan)
        # A point that is the end but for rounding is the end.
        slack = 1e-9 * max(abs(float(xs[0])), abs(float(xs[-1])))
        inside = (wanted >= xs[0] - slack) & (wanted <= xs[-1] + slack)
        found: Floats = np.where(inside, np.interp(wanted, xs, values), np.nan)
        return found

    def first_reaching(self, axis: str, target: float) -> float | None:
        """Where the curve first is at or below a target; None: never."""
        xs, values = self._known(axis)
        below = np.flatnonzero(values <= target)
        if not below.size:
            return None
        place = int(below[0])
        if place == 0:
            return float(xs[0])
        fraction = (values[place - 1] - target) / (values[place - 1] - values[place])
        return float(xs[place - 1] + fraction * (xs[place] - xs[place - 1]))

    def _known(self, axis: str) -> tuple[Floats, Floats]:
        xs: Floats = getattr(self, axis)
        known = np.isfinite(self.values) & np.isfinite(xs)
        return xs[known], self.values[known]


def smoothed(losses: Floats, weights: Floats, share: float = SMOOTHING) -> Floats:
    """Means over the last `share` of all tokens before each point, steps weighted by their tokens.

    Steps without a finite loss count in no mean; where a window holds none that is finite, as after
    a divergence, there is no value.
    """
    if not losses.size:
        return losses
    finite = np.isfinite(losses)
    ends = np.cumsum(weights)
    first = np.searchsorted(ends, ends - share * ends[-1], side="right")
    first = np.minimum(first, np.arange(losses.size))  # the step itself, if it is longer than that
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, losses * weights, 0.0))])
    counts = np.concatenate([[0.0], np.cumsum(np.where(finite, weights, 0.0))])
    upper = np.arange(1, losses.size + 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        means: Floats = (sums[upper] - sums[first]) / (counts[upper] - counts[first])
    return means


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """Curves of several seeds as one."""

    points: Floats
    mean: Floats
    half_width: Floats | None
    """Of the 95 % interval of the mean, by Student's t; None of one seed."""

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        width = None if self.half_width is None else self.half_width.tolist()
        return {"x": self.points.tolist(), "mean": self.mean.tolist(), "half_width": width}


def band_of(curves: Sequence[Curve], axis: str, most_points: int) -> Band | None:
    """Mean and interval where all of the curves have values; None where they never have."""
    begins = [begin for curve in curves if (begin := curve.begin(axis)) is not None]
    ends = [end for curve in curves if (end := curve.end(axis)) is not None]
    if not curves or len(begins) < len(curves) or max(begins) > min(ends):
        return None
    points = _points(curves, axis, max(begins), min(ends), most_points)
    values = np.stack([curve.at(axis, points) for curve in curves])  # [seeds, points]
    mean: Floats = values.mean(axis=0)
    if len(curves) == 1:
        return Band(points=points, mean=mean, half_width=None)
    error = values.std(axis=0, ddof=1) / np.sqrt(len(curves))
    return Band(points=points, mean=mean, half_width=quantile(0.975, len(curves) - 1) * error)


def _points(
    curves: Sequence[Curve], axis: str, begin: float, end: float, most_points: int
) -> Floats:
    """The points of the longest curve, or as many evenly spaced ones as are allowed."""
    own: Floats = max((getattr(curve, axis) for curve in curves), key=lambda xs: int(xs.size))
    own = np.unique(own[(own >= begin) & (own <= end)])
    if own.size and own.size <= most_points:
        return np.unique(np.concatenate([own, [begin, end]]))
    return np.linspace(begin, end, most_points)
