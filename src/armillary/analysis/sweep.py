"""Sweeps: many recipes from one, by values of its leaves.

optimizer.lr=1e-4,3e-4,1e-3      these values; `;` separates values that hold commas
optimizer.lr~log:1e-4:1e-2       any value in the range, evenly in its logarithm
model.n_layers~linear:2:12       any value in the range
optimizer.lr~log:1e-4:1e-2:5     five values of it, both ends included
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from armillary.foundation.errors import Problem, UserError

_ALLOWED = "LEAF=VALUE,VALUE,... or LEAF~log:LOW:HIGH[:COUNT] or LEAF~linear:LOW:HIGH[:COUNT]"
_MOST_POINTS = 1_000

Point = tuple[tuple[str, str], ...]
"""Leaves and their values, as typed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One leaf and what it takes."""

    leaf: str
    values: tuple[str, ...] = ()
    """Each as it would be typed; empty for a range without a count."""
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    is_whole: bool = False
    """Whether both ends are whole numbers, so that what lies between is rounded."""

    def draw(self, random_numbers: random.Random) -> str:
        """A value at random."""
        if self.values:
            return random_numbers.choice(self.values)
        return self._between(random_numbers.random())

    def points(self, count: int) -> tuple[str, ...]:
        """Values of the range, evenly, both ends included."""
        found = [self._between(place / max(1, count - 1)) for place in range(count)]
        return tuple(dict.fromkeys(found))

    def _between(self, share: float) -> str:
        if self.is_log:
            low, high = math.log(self.low), math.log(self.high)
            value = math.exp(low + share * (high - low))
        else:
            value = self.low + share * (self.high - self.low)
        return str(round(value)) if self.is_whole else f"{value:.4g}"


def parse_axis(text: str) -> Axis:
    """Reads one `--sweep`.

    Raises:
        UserError: it is no sweep.
    """
    leaf, equals, values = text.partition("=")
    if equals and "~" not in leaf:
        parts = [part.strip() for part in values.split(";" if ";" in values else ",")]
        if not leaf.strip() or not all(parts):
            raise UserError(Problem(f"--sweep {text}: a value or the leaf is empty", _ALLOWED))
        return Axis(leaf=_leaf(leaf), values=tuple(dict.fromkeys(parts)))
    leaf, tilde, values = text.partition("~")
    kind, *numbers = values.split(":")
    if not tilde or not leaf.strip() or kind not in ("log", "linear") or len(numbers) not in (2, 3):
        raise UserError(Problem(f"--sweep {text} is no sweep", _ALLOWED, "optimizer.lr=1e-4,1e-3"))
    return _range(text, _leaf(leaf), kind, numbers)


def _range(text: str, leaf: str, kind: str, numbers: list[str]) -> Axis:
    try:
        low, high = float(numbers[0]), float(numbers[1])
        count = int(numbers[2]) if len(numbers) == 3 else 0
    except ValueError:
        raise UserError(Problem(f"--sweep {text}: not numbers", _ALLOWED)) from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high) or (
        kind == "log" and low <= 0.0
    ):
        raise UserError(Problem(f"--sweep {text}: no range", "LOW below HIGH, and above 0 for log"))
    if len(numbers) == 3 and not 2 <= count <= _MOST_POINTS:
        raise UserError(Problem(f"--sweep {text}: {count} values", f"2 to {_MOST_POINTS}"))
    whole = all(number.lstrip("+-").isdigit() for number in numbers[:2])
    axis = Axis(leaf=leaf, low=low, high=high, is_log=kind == "log", is_whole=whole)
    return axis if not count else Axis(leaf=leaf, values=axis.points(count))


def _leaf(text: str) -> str:
    return text.strip().removeprefix("--").replace("-", "_")


def expand(axes: Sequence[Axis], *, draws: int | None, seed: int = 0) -> list[Point]:
    """The points of a sweep.

    Args:
        draws: that many at random, no two alike; None: the whole grid.
        seed: of the draws.

    Raises:
        UserError: a leaf is there twice, a range has no count for a grid, or there are too many.
    """
    if not axes:
        return [()]
    names = [axis.leaf for axis in axes]
    if len(set(names)) < len(names):
        raise UserError(Problem(f"--sweep of one leaf twice: {', '.join(names)}", "each leaf once"))
    if draws is not None:
        return _random(axes, draws, seed)
    unbounded = [axis.leaf for axis in axes if not axis.values]
    if unbounded:
        raise UserError(
            Problem(
                f"--sweep {unbounded[0]} is a range, and a grid needs values",
                "a count, as LOW:HIGH:5, or --random N",
                "--random 8",
            )
        )
    size = math.prod(len(axis.values) for axis in axes)
    if size > _MOST_POINTS:
        raise UserError(
            Problem(f"--sweep has {size} points", f"at most {_MOST_POINTS}", "--random 20")
        )
    rows = itertools.product(*(axis.values for axis in axes))
    return [tuple(zip(names, row, strict=True)) for row in rows]


def _random(axes: Sequence[Axis], draws: int, seed: int) -> list[Point]:
    if not 1 <= draws <= _MOST_POINTS:
        raise UserError(Problem(f"--random {draws}", f"1 to {_MOST_POINTS}", "--random 8"))
    numbers = random.Random(seed)
    found: dict[Point, None] = {}
    for _ in range(draws * 50):  # a small grid runs out of points that are new
        found[tuple((axis.leaf, axis.draw(numbers)) for axis in axes)] = None
        if len(found) == draws:
            break
    return list(found)
