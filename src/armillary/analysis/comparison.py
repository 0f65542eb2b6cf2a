"""Everything that is known of some contenders beside each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from armillary.analysis.contenders import (
    BITS,
    LOSS,
    Comparable,
    Contender,
    LeafRow,
    comparable,
    differing_leaves,
    round_to,
)
from armillary.analysis.curves import AXES, Curve
from armillary.analysis.runs import DIVERGED, FAILED, UNFINISHED, Run
from armillary.analysis.scaling import ScalingFit, fit_scaling
from armillary.analysis.significance import Pair, compare_groups
from armillary.analysis.student import Mean, mean_of
from armillary.foundation.errors import Problem, UserError

CURVES = {BITS: "looks", LOSS: "training"}
"""The curve of a run that goes with a figure."""
_FEWEST_SIZES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Equal:
    """A loss at one point of an axis that all runs have reached."""

    axis: str
    figure: str
    point: float
    means: tuple[Mean | None, ...]
    """For each contender, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """How soon the runs of a contender were at the target loss."""

    runs: int
    """That reached it."""
    means: dict[str, Mean | None]
    """By axis, over those runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The loss that runs are timed to."""

    figure: str
    value: float
    given: bool
    """Whether it was asked for; else it is the lowest that every run has reached."""
    reached: tuple[Reached, ...]
    """For each contender, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All figures; pages, tables and documents only show them."""

    title: str
    contenders: tuple[Contender, ...]
    comparable: Comparable
    pairs: tuple[Pair, ...]
    """Of the figure that `comparable` names; empty where there is none."""
    equals: tuple[Equal, ...]
    target: Target | None
    leaves: tuple[LeafRow, ...]
    fit: ScalingFit | None
    price_per_hour: float | None
    notes: tuple[str, ...]

    @property
    def figure(self) -> str | None:
        """What the verdict is about."""
        return self.comparable.figure

    def ranked(self) -> list[Contender]:
        """From the lowest mean loss up, those first whose runs all have one: a mean flatters where
        the runs that failed are not in it."""

        def rank(contender: Contender) -> tuple[bool, float]:
            mean = self.mean(contender)
            lost = mean is None or mean.count < len(contender.runs)
            return lost, math.inf if mean is None else mean.value

        return sorted(self.contenders, key=rank)

    def mean(self, contender: Contender) -> Mean | None:
        """Of the figure that the verdict is about, over the runs that have it."""
        return None if self.figure is None else mean_of(contender.values(self.figure))

    def cost(self, run: Run) -> float | None:
        """Of the steps and looks of a run, at the price of all its devices together."""
        if self.price_per_hour is None:
            return None
        return self.price_per_hour * (run.seconds + run.look_seconds) / 3600.0


def compare(
    contenders: Sequence[Contender],
    *,
    title: str = "",
    target_loss: float | None = None,
    price_per_hour: float | None = None,
    notes: Sequence[str] = (),
) -> Comparison:
    """Holds the contenders against each other.

    Args:
        target_loss: in the unit of the figure that the verdict is about.
        price_per_hour: of all devices of one run.
        notes: what else a reader should know.

    Raises:
        UserError: there are fewer than two contenders, or a target and nothing to hold it against.
    """
    if len(contenders) < 2:
        raise UserError(
            Problem(
                "there is nothing to compare: one recipe",
                "two recipes or runs, or one and a --sweep",
                "armillary compare debug debug --optimizer.lr 1e-3",
            )
        )
    may = comparable(contenders)
    if may.figure is None and target_loss is not None:
        raise UserError(Problem(f"--target-loss {target_loss:g}: {may.why}", fix="leave it out"))
    groups = {each.key: each.group(may.figure) for each in contenders} if may.figure else {}
    unfinished = {each.key: each.count(UNFINISHED) for each in contenders}
    figures = [figure for figure, can in ((BITS, may.bits), (LOSS, may.loss)) if can]
    equals = [_equal(contenders, axis, figure) for figure in figures for axis in AXES]
    target = _target(contenders, may, target_loss)
    return Comparison(
        title=title or _title([each.name for each in contenders]),
        contenders=tuple(contenders),
        comparable=may,
        pairs=tuple(compare_groups(groups, unfinished)) if groups else (),
        equals=tuple(equal for equal in equals if equal is not None),
        target=target,
        leaves=tuple(differing_leaves(contenders)),
        fit=_fit(contenders, may.figure),
        price_per_hour=price_per_hour,
        notes=(*notes, *_notes(contenders, may), *_untimed(target, target_loss)),
    )


def _title(names: Sequence[str], most: int = 3) -> str:
    rest = [f"{len(names) - most} more"] if len(names) > most else []
    return " or ".join([*names[:most], *rest])


def curve_of(run: Run, figure: str) -> Curve:
    """The curve of a run that goes with a figure."""
    curve: Curve = getattr(run, CURVES[figure])
    return curve


def _equal(contenders: Sequence[Contender], axis: str, figure: str) -> Equal | None:
    """At the last point that every run with a curve has reached; None where there is no such."""
    curves = [[curve_of(run, figure) for run in each.runs] for each in contenders]
    ends = [end for group in curves for curve in group if (end := curve.end(axis)) is not None]
    if not ends or any(all(curve.end(axis) is None for curve in group) for group in curves):
        return None
    point = min(ends)
    means = []
    for group in curves:
        values = [float(curve.at(axis, [point])[0]) for curve in group]
        means.append(mean_of([value for value in values if math.isfinite(value)]))
    return Equal(axis=axis, figure=figure, point=point, means=tuple(means))


def _target(contenders: Sequence[Contender], may: Comparable, asked: float | None) -> Target | None:
    figure = may.figure
    if figure is None:
        return None
    runs = [run for each in contenders for run in each.runs]
    looked = all(curve_of(run, BITS).end("tokens") for run in runs if run.steps)
    if (
        figure == BITS and not looked
    ):  # then the training loss tells how soon, unless bits are asked
        if asked is not None or not may.loss:
            return None
        figure = LOSS
    lowest = [
        float(np.nanmin(values))
        for run in runs
        if np.isfinite(values := curve_of(run, figure).values).any()
    ]
    if not lowest:
        return None
    value = max(lowest) if asked is None else asked
    reached = tuple(_reached(each, figure, value) for each in contenders)
    return Target(figure=figure, value=value, given=asked is not None, reached=reached)


def _reached(contender: Contender, figure: str, value: float) -> Reached:
    curves = [curve_of(run, figure) for run in contender.runs]
    found = {
        axis: [at for curve in curves if (at := curve.first_reaching(axis, value)) is not None]
        for axis in AXES
    }
    means = {axis: mean_of(values) for axis, values in found.items()}
    return Reached(runs=len(found["tokens"]), means=means)


def _fit(contenders: Sequence[Contender], figure: str | None) -> ScalingFit | None:
    """Over the best contender of each size, where there are several sizes."""
    if figure is None:
        return None
    best: dict[float, tuple[float, Contender]] = {}
    for each in contenders:
        mean, size = mean_of(each.values(figure)), each.runs[0].parameters if each.runs else None
        if mean is not None and size is not None:
            best[size] = min(best.get(size, (math.inf, each)), (mean.value, each), key=_first)
    points = [  # rounded: seeds of a size may differ by a few padded tokens
        (round_to(run.flops_per_token * run.tokens), value)
        for _, each in best.values()
        for run in each.runs
        if run.flops_per_token and (value := getattr(run, figure)) is not None
    ]
    if len(best) < _FEWEST_SIZES or len({compute for compute, _ in points}) < _FEWEST_SIZES:
        return None
    return fit_scaling([compute for compute, _ in points], [loss for _, loss in points])


def _first(pair: tuple[float, Contender]) -> float:
    return pair[0]


def _notes(contenders: Sequence[Contender], may: Comparable) -> list[str]:
    notes = [may.why] if may.why else []
    runs = [run for each in contenders for run in each.runs]
    for each in contenders:
        for outcome in (DIVERGED, FAILED, UNFINISHED):
            if count := each.count(outcome):
                notes.append(
                    f"{each.key}: {count} of {len(each.runs)} runs {_ended(outcome, count)}"
                )
        worse = sum("above" in run.reason and run.bits_per_byte is not None for run in each.runs)
        if worse:
            notes.append(
                f"{each.key}: {worse} of {len(each.runs)} runs ended above where they began"
            )
    tokens = {round_to(run.tokens, 2) for run in runs if run.tokens}
    if len(tokens) > 1:
        notes.append("the runs have read different numbers of tokens: see the losses at equal ones")
    if len({run.device for run in runs if run.device}) > 1:
        notes.append("the runs were made on different devices: times and speeds tell of those too")
    return notes


def _untimed(target: Target | None, asked: float | None) -> list[str]:
    if asked is None or target is not None:
        return []
    return ["the time to the target is not known: not all runs looked at held-out text on the way"]


def _ended(outcome: str, count: int) -> str:
    if outcome == UNFINISHED:
        return "is not finished" if count == 1 else "are not finished"
    return outcome
