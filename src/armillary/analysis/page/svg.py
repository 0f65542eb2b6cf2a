"""Elements of SVG and HTML as text, with whatever came from outside escaped."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence


def tag(name: str, *content: str, **attributes: object) -> str:
    """An element; `class_` is `class`, `stroke_width` is `stroke-width`; None leaves one out.

    Content is markup: plain text goes through `text` first.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_plain(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{''.join(content)}</{name}>"


def text(value: object) -> str:
    """Plain text as markup."""
    return html.escape(str(value), quote=False)


def path_of(points: Iterable[tuple[float, float]]) -> str:
    """A line through the points; where one is not finite it is broken."""
    parts: list[str] = []
    pen = "M"
    for x, y in points:
        if math.isfinite(x) and math.isfinite(y):
            parts.append(f"{pen}{short(x)} {short(y)}")
            pen = "L"
        else:
            pen = "M"
    return "".join(parts)


def area_of(upper: Sequence[tuple[float, float]], lower: Sequence[tuple[float, float]]) -> str:
    """What lies between two lines."""
    around = [*upper, *reversed(lower)]
    return path_of(around) + "Z" if around else ""


def short(value: float) -> str:
    """A coordinate to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def _plain(value: object) -> str:
    return short(value) if isinstance(value, float) else str(value)
