"""A curve in one line of text."""

from __future__ import annotations

from collections.abc import Sequence

_LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as bars, lowest to highest, averaged down to at most `width` characters."""
    if not values or width <= 0:
        return ""
    columns = min(width, len(values))
    means = []
    for column in range(columns):
        part = values[column * len(values) // columns : (column + 1) * len(values) // columns]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    scale = (len(_LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(_LEVELS[round((mean - low) * scale)] for mean in means)
