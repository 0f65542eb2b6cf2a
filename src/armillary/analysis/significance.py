"""Whether two groups of runs differ, and what could have been found if they do.

The rules, fixed before any figure is seen:

- The same seeds in both groups: paired t over the differences seed by seed. Else Welch's t, which
  does not take the groups to scatter alike (Welch 1947, with the degrees of freedom found there).
- Several pairs: p-values are adjusted by Holm 1979, so that the chance of a single false
  difference in all of the comparison stays below `ALPHA`.
- Beside "no significant difference" stands the smallest true difference that this many seeds,
  which scatter so much, would have found in four of five repeats.
- One seed tells nothing about the scatter between seeds, so there is no test.
- A run without a result is never dropped from its group: losses are then not tested, since those of
  the survivors flatter, but the counts of failures are (Fisher's exact test, two-sided). One that
  is not finished is no failure: nothing is tested before it ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from armillary.analysis.student import (
    detectable_effect,
    quantile,
    standard_deviation,
    two_sided_p,
)

ALPHA = 0.05
POWER = 0.8
_ROUNDING = 1e-7
"""Of a figure: what sums of float32 leave open. No standard error is taken to be below it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """What is known of the difference between two groups of runs."""

    first: str
    second: str
    test: str
    """`paired t`, `Welch t`, `Fisher exact` on the counts of failures, or `none`."""
    counts: tuple[int, int]
    """Runs with a result in each group."""
    difference: float | None = None
    """Mean of the first minus mean of the second; negative: the first has the lower loss."""
    interval: tuple[float, float] | None = None
    """Of the difference, at 95 % for this pair alone."""
    p: float | None = None
    adjusted_p: float | None = None
    """By Holm, over all pairs that were tested."""
    detectable: float | None = None
    """The smallest true difference that is found in four of five repeats, at Holm's first level."""
    reason: str = ""
    """Why there is no test of the losses; empty where there is one."""
    standard_error: float | None = None
    freedom: float | None = None

    @property
    def significant(self) -> bool | None:
        """Whether the groups differ; None: it cannot be told."""
        return None if self.adjusted_p is None else self.adjusted_p <= ALPHA


Group = Mapping[int, float | None]
"""A figure by seed; None is a run that has none: it diverged, failed or is not finished."""


def compare_groups(
    groups: Mapping[str, Group], unfinished: Mapping[str, int] | None = None
) -> list[Pair]:
    """Every pair of groups, in order, with p-values adjusted over all of them.

    Args:
        unfinished: how many of a group's runs without a result have not ended yet, by group.
    """
    names = list(groups)
    waiting = {name: (unfinished or {}).get(name, 0) for name in names}
    pairs = [
        compare_pair(
            one, groups[one], other, groups[other], unfinished=waiting[one] + waiting[other]
        )
        for place, one in enumerate(names)
        for other in names[place + 1 :]
    ]
    adjusted = iter(holm([pair.p for pair in pairs if pair.p is not None]))
    tested = sum(pair.p is not None for pair in pairs)
    return [
        pair
        if pair.p is None
        else replace(pair, adjusted_p=next(adjusted), detectable=_detectable(pair, tested))
        for pair in pairs
    ]


def compare_pair(first: str, one: Group, second: str, other: Group, *, unfinished: int = 0) -> Pair:
    """One pair; its p-value is for itself alone."""
    xs = {seed: value for seed, value in one.items() if value is not None}
    ys = {seed: value for seed, value in other.items() if value is not None}
    counts = len(xs), len(ys)
    difference = _mean(xs.values()) - _mean(ys.values()) if all(counts) else None
    lost = len(one) - len(xs), len(other) - len(ys)
    bare = Pair(first=first, second=second, test="none", counts=counts, difference=difference)
    if unfinished:
        what = "a run is" if unfinished == 1 else f"{unfinished} runs are"
        return replace(bare, reason=f"it cannot be told yet: {what} not finished")
    if any(lost):
        return _by_counts(bare, lost)
    least = _ROUNDING * max(map(abs, [*xs.values(), *ys.values()]), default=0.0) or _ROUNDING
    if set(xs) == set(ys) and len(xs) > 1:
        error, freedom = _paired([xs[seed] - ys[seed] for seed in sorted(xs)])
        return _by_t(bare, "paired t", max(error, least), freedom)
    if min(counts) > 1:
        error, freedom = _welch(list(xs.values()), list(ys.values()))
        return _by_t(bare, "Welch t", max(error, least), freedom)
    seeds = "one seed" if max(counts) == 1 else "one seed of one of them"
    return replace(bare, reason=f"it cannot be told with {seeds}")


def _by_counts(pair: Pair, lost: tuple[int, int]) -> Pair:
    totals = pair.counts[0] + lost[0], pair.counts[1] + lost[1]
    reason = (
        f"{lost[0]} of {totals[0]} and {lost[1]} of {totals[1]} runs have no result, so losses are"
        " not tested: those of the others would flatter"
    )
    if min(totals) < 2:
        return replace(pair, reason=reason)
    p = fisher_exact(lost[0], pair.counts[0], lost[1], pair.counts[1])
    return replace(pair, test="Fisher exact", p=p, reason=reason)


def _by_t(pair: Pair, test: str, error: float, freedom: float) -> Pair:
    assert pair.difference is not None, "both groups have results"
    p = two_sided_p(abs(pair.difference) / error, freedom)
    half = quantile(1.0 - ALPHA / 2.0, freedom) * error
    interval = pair.difference - half, pair.difference + half
    return replace(pair, test=test, p=p, interval=interval, standard_error=error, freedom=freedom)


def _paired(differences: list[float]) -> tuple[float, float]:
    """Standard error of the mean difference, and its degrees of freedom."""
    return standard_deviation(differences) / math.sqrt(len(differences)), len(differences) - 1.0


def _welch(xs: list[float], ys: list[float]) -> tuple[float, float]:
    one = standard_deviation(xs) ** 2 / len(xs)
    other = standard_deviation(ys) ** 2 / len(ys)
    below = one**2 / (len(xs) - 1) + other**2 / (len(ys) - 1)
    freedom = (one + other) ** 2 / below if below > 0.0 else float(len(xs) + len(ys) - 2)
    return math.sqrt(one + other), freedom


def _detectable(pair: Pair, tested: int) -> float | None:
    if pair.standard_error is None or pair.freedom is None:
        return None
    return pair.standard_error * detectable_effect(pair.freedom, ALPHA / tested, POWER)


def holm(values: Sequence[float]) -> list[float]:
    """p-values adjusted for being several (Holm 1979): each may be held against `ALPHA` itself."""
    adjusted = [0.0] * len(values)
    highest = 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        highest = max(highest, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = highest
    return adjusted


def fisher_exact(a: int, b: int, c: int, d: int) -> float:
    """Two-sided p that the rows (a, b) and (c, d) of counts come from one distribution.

    The sum of all tables of the same margins that are as probable or less (Fisher 1935).
    """
    row, column, total = a + b, a + c, a + b + c + d
    tables = {
        x: math.comb(row, x) * math.comb(total - row, column - x)
        for x in range(max(0, column - (total - row)), min(row, column) + 1)
    }
    extreme = sum(count for count in tables.values() if count <= tables[a])
    return extreme / sum(tables.values())


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return math.fsum(listed) / len(listed)
