"""Numbers as people read them. One width, no surprises, never a made-up value."""

from __future__ import annotations

UNKNOWN = "n/a"
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def byte_count(count: float | None) -> str:
    """1234567 -> `1.2 MiB`."""
    if count is None:
        return UNKNOWN
    value = float(count)
    for unit in _BINARY:
        if abs(value) < 1023.95 or unit == _BINARY[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("the last unit always returns")


def quantity(count: float | None) -> str:
    """2_200_000 -> `2.2M`; below 10,000 digits with a comma."""
    if count is None:
        return UNKNOWN
    if abs(count) < 9_999.5:
        return f"{count:,.0f}"
    for limit, unit in ((1e6, "K"), (1e9, "M"), (1e12, "B")):
        if abs(count) < limit * 0.9995:
            return f"{count / (limit / 1e3):.3g}{unit}"
    return f"{count / 1e12:.3g}T"


def duration(seconds: float | None) -> str:
    """192 -> `3m12s`; `0.4s`; `2h05m`; `3d04h`."""
    if seconds is None:
        return UNKNOWN
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h{minutes:02d}m"
    return f"{hours // 24}d{hours % 24:02d}h"


def percent(share: float | None, digits: int = 1) -> str:
    """0.4123 -> `41.2 %`."""
    return UNKNOWN if share is None else f"{share * 100:.{digits}f} %"


def number(value: float | None, form: str) -> str:
    """The value in a format spec, or `n/a`."""
    return UNKNOWN if value is None else format(value, form)


def flop_rate(flops: float | None) -> str:
    """989e12 -> `989 TFLOP/s`."""
    if flops is None:
        return UNKNOWN
    for unit, scale in (("P", 1e15), ("T", 1e12)):
        if flops >= scale * 0.9995:
            return f"{flops / scale:.4g} {unit}FLOP/s"
    return f"{flops / 1e9:.3g} GFLOP/s"


def count_of(count: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
