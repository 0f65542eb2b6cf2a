"""The verdict in words: what may be said, and no more."""

from __future__ import annotations

import math
from dataclasses import dataclass

from armillary.analysis.comparison import Comparison
from armillary.analysis.contenders import BITS, Contender
from armillary.analysis.significance import Pair

UNITS = {BITS: "bits per byte of held-out text", "loss": "nats per token of training text"}
SHORT_UNITS = {BITS: "bits per byte", "loss": "nats per token"}

DIFFERENT, SAME, UNTOLD = "different", "no significant difference", "cannot be told"


@dataclass(frozen=True, slots=True)
class Verdict:
    """In one word and in some sentences."""

    kind: str
    """`different`: some pair is; `no significant difference`; `cannot be told`."""
    text: str


def verdict_of(comparison: Comparison) -> Verdict:
    """What the tests allow to be said of the whole."""
    if comparison.figure is None:
        return Verdict(UNTOLD, f"Cannot be told: {comparison.comparable.why}.")
    pairs = comparison.pairs
    known = [pair for pair in pairs if pair.significant is not None]
    if any(pair.significant for pair in known):
        kind = DIFFERENT
    else:
        kind = SAME if len(known) == len(pairs) else UNTOLD
    if len(pairs) == 1:
        return Verdict(kind, _capital(words_of(pairs[0], comparison)))
    return Verdict(kind, _of_many(comparison, kind))


def words_of(pair: Pair, comparison: Comparison) -> str:
    """A pair in a sentence or two."""
    assert comparison.figure is not None, "pairs are of a figure"
    first, second = pair.first, pair.second
    if pair.test == "Fisher exact":
        found = "they fail differently often" if pair.significant else "no significant difference"
        return f"{pair.reason}. In how often they fail: {found} ({_p(pair)})."
    if pair.significant is None or pair.difference is None or pair.interval is None:
        seen = "" if pair.difference is None else f"; seen: {_lower(pair, comparison.figure)}"
        return f"{pair.reason}{seen}."
    test = f"{pair.test}, {_seeds(pair)}, {_p(pair)}"
    if pair.significant:
        better = first if pair.difference < 0 else second
        low, high = sorted(map(abs, pair.interval)) if _one_sided(pair) else pair.interval
        interval = f"95 % interval {figure(low)} to {figure(high)}"
        size = f"{figure(abs(pair.difference))} {SHORT_UNITS[comparison.figure]}"
        return f"{better} is better by {size} ({interval}; {test})."
    found = (
        ""
        if pair.detectable is None
        else f" A true difference of {figure(pair.detectable)} would be found in 4 of 5 such"
        " comparisons; smaller ones can be missed."
    )
    seen = f"seen {_lower(pair, comparison.figure)}"
    return f"no significant difference between {first} and {second}: {seen} ({test}).{found}"


def _one_sided(pair: Pair) -> bool:
    assert pair.interval is not None, "asked of a test with an interval"
    return pair.interval[0] * pair.interval[1] > 0


def _lower(pair: Pair, name: str) -> str:
    assert pair.difference is not None, "asked where both have a mean"
    if pair.difference == 0:
        return "the same loss"
    lower = pair.first if pair.difference < 0 else pair.second
    return f"{lower} lower by {figure(abs(pair.difference))} {SHORT_UNITS[name]}"


def _of_many(comparison: Comparison, kind: str) -> str:
    ranked = comparison.ranked()
    best = ranked[0]
    if comparison.mean(best) is None:
        return "Cannot be told: no run has a result."
    if kind == SAME:
        return (
            f"No significant difference among {len(ranked)} recipes, over {len(comparison.pairs)}"
            f" pairs with Holm's correction. Lowest mean: {best.key}."
        )
    groups: dict[bool | None, list[Contender]] = {True: [], False: [], None: []}
    fails = []
    for each in ranked[1:]:
        pair = _pair_of(comparison, best, each)
        if pair.significant and pair.interval is None:
            fails.append(each)
        else:
            groups[pair.significant].append(each)
    lowest = f"{best.key} has the lowest mean"
    if groups[True]:
        parts = [f"{lowest} and is significantly better than {_keys(groups[True])}."]
    else:
        parts = [f"{lowest}."]
    if fails:
        parts.append(f"It differs from {_keys(fails)} in how often runs fail.")
    if groups[False]:
        parts.append(f"No significant difference from {_keys(groups[False])}.")
    if groups[None]:
        parts.append(f"It cannot be told from {_keys(groups[None])}.")
    others = sum(
        bool(pair.significant) and best.key not in (pair.first, pair.second)
        for pair in comparison.pairs
    )
    if others:
        parts.append(
            f"Among the others, {others} {'pair differs' if others == 1 else 'pairs differ'}."
        )
    return " ".join([*parts, f"{len(comparison.pairs)} pairs, Holm's correction."])


def _pair_of(comparison: Comparison, one: Contender, other: Contender) -> Pair:
    wanted = {one.key, other.key}
    return next(pair for pair in comparison.pairs if {pair.first, pair.second} == wanted)


def _keys(contenders: list[Contender], most: int = 8) -> str:
    names = [each.key for each in contenders[:most]]
    if len(contenders) > most:
        return f"{', '.join(names)} and {len(contenders) - most} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _seeds(pair: Pair) -> str:
    one, other = pair.counts
    return f"{one} seeds" if one == other else f"{one} and {other} seeds"


def _p(pair: Pair) -> str:
    assert pair.adjusted_p is not None, "asked of a test"
    value = pair.adjusted_p
    return "p < 0.0001" if value < 1e-4 else f"p = {value:.2g}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def figure(value: float) -> str:
    """A difference of losses: three digits that say something, and no exponent where it can be."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}" if digits <= 7 else f"{value:.1e}"
