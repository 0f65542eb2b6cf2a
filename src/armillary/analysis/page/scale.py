"""Axes: from values to places on a drawing, and the marks that people read them by."""

from __future__ import annotations

import math
from dataclasses import dataclass

MINUS = "\N{MINUS SIGN}"

_SI = ((1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_COUNTS = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"), (1e3, "thousand"))
_TIMES = ((172_800.0, 86_400.0, "days"), (7_200.0, 3_600.0, "hours"), (180.0, 60.0, "minutes"))


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to places."""

    low: float
    high: float
    begin: float
    """Where the low end is drawn."""
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """The place of a value."""
        low, high, value = self._part(self.low), self._part(self.high), self._part(value)
        share = 0.5 if high == low else (value - low) / (high - low)
        return self.begin + share * (self.end - self.begin)

    def _part(self, value: float) -> float:
        if not self.is_log:
            return value
        return math.log10(value) if value > 0.0 else math.nan

    def ticks(self, wanted: int) -> list[float]:
        """About so many round values from end to end."""
        if self.is_log:
            return log_ticks(self.low, self.high, wanted)
        return linear_ticks(self.low, self.high, wanted)


def linear_ticks(low: float, high: float, wanted: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within the range."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, wanted)
    power: float = 10.0 ** math.floor(math.log10(raw))
    step = next(power * each for each in (1, 2, 5, 10) if power * each >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def log_ticks(low: float, high: float, wanted: int) -> list[float]:
    """Powers of ten; with few of them also their multiples by 2 and 5, or by 3."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for multiples in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)):
        found = [each * 10.0**power for power in powers for each in multiples]
        found = [value for value in found if low * 0.999 <= value <= high * 1.001]
        if len(found) >= min(3, wanted):
            break
    every = math.ceil(len(found) / max(1, wanted))
    return found[::every]


def tick_text(value: float, step: float) -> str:
    """A value as a mark on a linear axis whose marks are `step` apart."""
    if value == 0:
        return "0"
    digits = max(0, -math.floor(math.log10(abs(step)) + 1e-9)) if step else 3
    written = f"{value:,.{digits}f}" if digits <= 6 else f"{value:.3g}"
    return written.replace("-", MINUS)


def log_text(value: float) -> str:
    """A value as a mark on a logarithmic axis."""
    if 1e-3 <= value < 1e5:
        return f"{value:,.6g}"
    mantissa, _, power = f"{value:.0e}".partition("e")
    raised = str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{raised}" if mantissa == "1" else f"{mantissa}·10{raised}"


def unit_of(axis: str, largest: float) -> tuple[float, str]:
    """What values of an axis are divided by, and what the axis is then called."""
    if axis == "seconds":
        for least, divisor, name in _TIMES:
            if largest >= least:
                return divisor, f"training time, {name}"
        return 1.0, "training time, seconds"
    if axis == "flops":
        for size, prefix in _SI:
            if largest >= 2 * size:
                return size, f"compute, {prefix}FLOP"
        return 1.0, "compute, FLOP"
    for size, name in _COUNTS:
        if largest >= 2 * size:
            return size, f"tokens, {name}s"
    return 1.0, "tokens"
