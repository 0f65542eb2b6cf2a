"""Charts as SVG, each drawn for a wide page and for a phone, so that its text stays readable."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from armillary.analysis.curves import Band, Curve
from armillary.analysis.page.scale import Scale, linear_ticks, log_text, tick_text, unit_of
from armillary.analysis.page.svg import area_of, path_of, tag, text
from armillary.analysis.student import Mean

COLOURS = 8
_LABEL_GAP = 14.0
_ROW = 34.0
_WIDE, _NARROW = 860.0, 350.0


@dataclass(frozen=True, slots=True)
class Frame:
    """A drawing and the part of it that holds the data."""

    width: float
    height: float
    left: float = 56.0
    right: float = 26.0
    top: float = 14.0
    bottom: float = 46.0

    @property
    def x_end(self) -> float:
        """Right end of the data."""
        return self.width - self.right

    @property
    def y_end(self) -> float:
        """Lower end of the data."""
        return self.height - self.bottom

    @property
    def is_narrow(self) -> bool:
        """Whether it is the phone's."""
        return self.width < _WIDE


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """What one recipe shows in a chart of curves."""

    key: str
    colour: int
    band: Band
    seeds: tuple[Curve, ...] = ()


def colour_class(number: int) -> str:
    """The class that gives an element the colour of a recipe; all late ones share one."""
    return f"c{number}" if number < COLOURS else "c-rest"


def both(draw: Callable[[Frame], str], *, height: float, narrow_height: float = 0.0) -> str:
    """The drawing for either width; the page shows the one that fits."""
    frames = (
        ("wide", Frame(_WIDE, height)),
        ("narrow", Frame(_NARROW, narrow_height or height, left=44.0, right=20.0)),
    )
    return "".join(tag("div", draw(frame), class_=f"chart {name}") for name, frame in frames)


def curves_chart(
    frame: Frame, series: Sequence[Series], axis: str, *, title: str, chart: str
) -> str:
    """Means with their bands, and each seed as a thin line."""
    points = [each.band for each in series]
    high_x = max(float(band.points[-1]) for band in points)
    low_x = min(float(band.points[0]) for band in points)
    low_x = 0.0 if low_x < 0.2 * high_x else low_x
    low_y, high_y = _range_of_curves(points)
    x = Scale(low_x, high_x, frame.left, frame.x_end)
    y = Scale(low_y, high_y, frame.y_end, frame.top)
    clip = f"clip-{chart}-{int(frame.width)}"
    inside = [_seed_lines(each, axis, x, y) for each in series]
    inside += [_band(each, x, y) for each in series]
    inside += [_mean_line(each, x, y) for each in series]
    divisor, x_title = unit_of(axis, high_x)
    content = [
        tag("title", text(title)),
        tag("clipPath", _rectangle(frame), id=clip),
        *_grid(frame, x, y, x_title=x_title, divisor=divisor),
        tag("g", *inside, clip_path=f"url(#{clip})"),
        *_end_labels(series, x, y),
        tag("line", class_="hair", y1=frame.top, y2=frame.y_end, x1=0, x2=0),
        tag("rect", class_="catch", x=frame.left, y=frame.top, width=frame.x_end - frame.left,
            height=frame.y_end - frame.top, fill="transparent"),
    ]  # fmt: skip
    return _svg(frame, content, data_chart=chart, data_low=repr(x.low), data_high=repr(x.high),
                data_left=frame.left, data_right=frame.x_end)  # fmt: skip


def _range_of_curves(bands: Sequence[Band]) -> tuple[float, float]:
    """Of what comes after the first tenth: the fall at the start would flatten all the rest."""
    lows, highs = [], []
    for band in bands:
        late = band.points >= band.points[0] + 0.1 * (band.points[-1] - band.points[0])
        lows.append(float(band.mean[late].min()))
        highs.append(float(band.mean[late].max()))
    low, high = min(lows), max(highs)
    room = 0.06 * (high - low) or max(1e-3, abs(high) * 0.01)
    return low - room, high + room


def _seed_lines(series: Series, axis: str, x: Scale, y: Scale) -> str:
    lines = []
    for curve in series.seeds:
        values = curve.at(axis, series.band.points)
        points = [(x.at(a), y.at(b)) for a, b in zip(series.band.points, values, strict=True)]
        lines.append(tag("path", class_="seed", d=path_of(points)))
    return tag("g", *lines, class_=_classes(series), data_key=series.key)


def _band(series: Series, x: Scale, y: Scale) -> str:
    band = series.band
    if band.half_width is None or len(series.seeds) == 2:  # of two it would cover all the chart
        return ""
    xs = [x.at(value) for value in band.points]
    upper = [(a, y.at(v)) for a, v in zip(xs, band.mean + band.half_width, strict=True)]
    lower = [(a, y.at(v)) for a, v in zip(xs, band.mean - band.half_width, strict=True)]
    shape = tag("path", class_="band", d=area_of(upper, lower))
    return tag("g", shape, class_=_classes(series), data_key=series.key)


def _mean_line(series: Series, x: Scale, y: Scale) -> str:
    band = series.band
    points = [(x.at(a), y.at(b)) for a, b in zip(band.points, band.mean, strict=True)]
    line = tag("path", class_="mean", d=path_of(points))
    end = tag("circle", class_="last", cx=points[-1][0], cy=points[-1][1], r=3)
    return tag("g", line, end, class_=_classes(series), data_key=series.key)


def _classes(series: Series) -> str:
    return f"series {colour_class(series.colour)}"


def _end_labels(series: Sequence[Series], x: Scale, y: Scale) -> list[str]:
    """The sign of each recipe beside the end of its line, pushed apart where lines meet."""
    shown = [each for each in series if each.colour < COLOURS]
    labels, last = [], -math.inf
    for each in sorted(shown, key=_last_value, reverse=True):  # from the top
        last = max(y.at(_last_value(each)), last + _LABEL_GAP)
        end = x.at(float(each.band.points[-1])) + 6.0
        mark = tag("text", text(each.key), x=end, y=min(last, y.begin + _LABEL_GAP) + 4.0)
        labels.append(tag("g", mark, class_=f"end {_classes(each)}", data_key=each.key))
    return labels


def _last_value(series: Series) -> float:
    return float(series.band.mean[-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A line of a chart of means: single values, their mean, its interval."""

    label: str
    colour: int
    values: tuple[float, ...]
    mean: float
    interval: tuple[float, float] | None
    remark: str = ""


def rows_chart(frame: Frame, rows: Sequence[Row], *, title: str, x_title: str, zero: bool) -> str:
    """Rows from top to bottom over one axis; `zero` marks the line of no difference."""
    left = 16.0 + 8.0 * max(len(row.label) for row in rows)
    height = frame.top + _ROW * len(rows) + frame.bottom
    frame = Frame(frame.width, height, left=left, right=frame.right)
    found = [value for row in rows for value in (*row.values, row.mean, *(row.interval or ()))]
    found += [0.0] if zero else []
    low, high = min(found), max(found)
    room = 0.06 * (high - low) or max(1e-3, abs(high) * 0.01)
    x = Scale(low - room, high + room, frame.left, frame.x_end)
    y = Scale(0.0, 1.0, frame.y_end, frame.top)
    content = [tag("title", text(title))]
    content += _grid(frame, x, y, x_title=x_title, divisor=1.0, y_marks=False)
    if zero:
        content.append(tag("line", class_="zero", x1=x.at(0), x2=x.at(0), y1=frame.top,
                           y2=frame.y_end))  # fmt: skip
    for place, row in enumerate(rows):
        content.append(_row(row, x, frame.top + _ROW * (place + 0.5), frame))
    return _svg(frame, content)


def _row(row: Row, x: Scale, y: float, frame: Frame) -> str:
    parts = [tag("title", text(row.remark or row.label))]
    parts.append(tag("text", text(row.label), class_="row", x=frame.left - 10.0, y=y + 4.5))
    if row.interval is not None:
        low, high = map(x.at, row.interval)
        parts.append(tag("line", class_="interval", x1=low, x2=high, y1=y, y2=y))
    parts += [tag("circle", class_="dot", cx=x.at(value), cy=y, r=4) for value in row.values]
    parts.append(tag("line", class_="tick", x1=x.at(row.mean), x2=x.at(row.mean), y1=y - 9.0,
                     y2=y + 9.0))  # fmt: skip
    return tag("g", *parts, class_=f"series {colour_class(row.colour)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A mean at a place, with its single values."""

    key: str
    colour: int
    x: float
    values: tuple[float, ...]
    mean: Mean


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A fitted line with what is known of it."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


def points_chart(
    frame: Frame,
    points: Sequence[Point],
    *,
    title: str,
    chart: str,
    x_title: str,
    x_log: bool,
    line: Line | None = None,
) -> str:
    """Losses over some figure of the recipes."""
    xs = [point.x for point in points] + list(line.xs if line else ())
    ys = [value for point in points for value in (*point.values, point.mean.value)]
    ys += [] if line is None else [*line.ys]
    x = Scale(*_widened(min(xs), max(xs), x_log), frame.left, frame.x_end, x_log)
    y = Scale(*_widened(min(ys), max(ys), False), frame.y_end, frame.top)
    clip = f"clip-{chart}-{int(frame.width)}"
    content = [tag("title", text(title)), tag("clipPath", _rectangle(frame), id=clip)]
    content += _grid(frame, x, y, x_title=x_title, divisor=1.0)
    if line is not None:
        fitted = [_between(line, x, y)] if line.low else []
        middle = zip(map(x.at, line.xs), map(y.at, line.ys), strict=True)
        fitted.append(tag("path", class_="mean", d=path_of(middle)))
        content.append(tag("g", *fitted, class_="series fit", clip_path=f"url(#{clip})"))
    content += [_point(point, x, y, frame) for point in points]
    return _svg(frame, content)


def _between(line: Line, x: Scale, y: Scale) -> str:
    xs = [x.at(value) for value in line.xs]
    upper = list(zip(xs, map(y.at, line.high), strict=True))
    lower = list(zip(xs, map(y.at, line.low), strict=True))
    return tag("path", class_="band", d=area_of(upper, lower))


def _point(point: Point, x: Scale, y: Scale, frame: Frame) -> str:
    at, middle = x.at(point.x), y.at(point.mean.value)
    parts = [tag("title", text(f"{point.key}: {point.mean.value:.4f}"))]
    if point.mean.half_width is not None:
        ends = [y.at(max(y.low, min(y.high, point.mean.value + sign * point.mean.half_width)))
                for sign in (-1, 1)]  # fmt: skip
        parts.append(tag("line", class_="interval", x1=at, x2=at, y1=ends[0], y2=ends[1]))
    parts += [tag("circle", class_="dot", cx=at, cy=y.at(value), r=3.5) for value in point.values]
    parts.append(tag("line", class_="tick", x1=at - 8.0, x2=at + 8.0, y1=middle, y2=middle))
    beside = at + 11.0 if at + 24.0 < frame.x_end else at - 20.0
    parts.append(tag("text", text(point.key), class_="sign", x=beside, y=middle + 4.0))
    return tag("g", *parts, class_=f"series {colour_class(point.colour)}")


def _widened(low: float, high: float, is_log: bool) -> tuple[float, float]:
    if is_log:
        factor = max(1.05, (high / low) ** 0.06)
        return low / factor, high * factor
    room = 0.08 * (high - low) or max(1e-3, abs(high) * 0.01)
    return low - room, high + room


def _grid(
    frame: Frame,
    x: Scale,
    y: Scale,
    *,
    x_title: str,
    divisor: float,
    y_marks: bool = True,
) -> list[str]:
    """Lines, marks and the names of the axes."""
    parts = []
    if y_marks:
        for value, mark in _marks(y, 5, 1.0):
            at = y.at(value)
            parts.append(tag("line", class_="grid", x1=frame.left, x2=frame.x_end, y1=at, y2=at))
            parts.append(tag("text", text(mark), class_="mark y", x=frame.left - 8.0, y=at + 4.0))
    for value, mark in _marks(x, 4 if frame.is_narrow else 7, divisor):
        at = x.at(value)
        parts.append(tag("line", class_="grid", x1=at, x2=at, y1=frame.top, y2=frame.y_end))
        parts.append(tag("text", text(mark), class_="mark x", x=at, y=frame.y_end + 18.0))
    middle = (frame.left + frame.x_end) / 2.0
    parts.append(tag("text", text(x_title), class_="axis", x=middle, y=frame.height - 8.0))
    return parts


def _marks(scale: Scale, wanted: int, divisor: float) -> list[tuple[float, str]]:
    """Places of the marks and what stands at them."""
    if scale.is_log:
        return [(value, log_text(value)) for value in scale.ticks(wanted)]
    ticks = linear_ticks(scale.low / divisor, scale.high / divisor, wanted)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else abs(ticks[0]) / 10 if ticks else 1.0
    return [(value * divisor, tick_text(value, step)) for value in ticks]


def _rectangle(frame: Frame) -> str:
    return tag("rect", x=frame.left, y=frame.top - 2.0, width=frame.x_end - frame.left + 2.0,
               height=frame.y_end - frame.top + 4.0)  # fmt: skip


def _svg(frame: Frame, content: Sequence[str], **attributes: object) -> str:
    box = f"0 0 {frame.width:.0f} {frame.height:.0f}"
    return tag("svg", *content, viewBox=box, role="img", **attributes)
