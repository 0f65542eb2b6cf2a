"""The figures of the page: which charts a comparison has, and what is in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from armillary.analysis.comparison import Comparison, curve_of
from armillary.analysis.contenders import BITS, LOSS, Contender, round_to
from armillary.analysis.curves import AXES, band_of
from armillary.analysis.page.charts import (
    COLOURS,
    Frame,
    Line,
    Point,
    Row,
    Series,
    both,
    colour_class,
    curves_chart,
    points_chart,
    rows_chart,
)
from armillary.analysis.page.scale import MINUS
from armillary.analysis.page.svg import tag, text
from armillary.analysis.scaling import FURTHER
from armillary.analysis.significance import Pair
from armillary.analysis.student import mean_of
from armillary.analysis.verdict import SHORT_UNITS, UNITS, words_of

_MOST_DRAWN = 24
_MOST_SEEDS_DRAWN = 8
_MOST_ROWS = 24
_CURVE_CHARACTERS = 1_000_000
"""About how much of the page all curves may take."""
_CHARACTERS_A_POINT = 14


@dataclass(frozen=True, slots=True)
class Figures:
    """A comparison, and how its recipes are told apart in charts."""

    comparison: Comparison
    ranked: tuple[Contender, ...]
    colours: dict[str, int]
    """By key: 0 to 7 for the eight with the lowest means in the order of their keys; then 8."""

    @classmethod
    def of(cls, comparison: Comparison) -> Figures:
        """For a comparison."""
        ranked = comparison.ranked()
        coloured = {each.key for each in ranked[:COLOURS]}
        colours, used = {}, 0
        for contender in comparison.contenders:
            colours[contender.key] = used if contender.key in coloured else COLOURS
            used += contender.key in coloured
        return cls(comparison, tuple(ranked), colours)

    @property
    def drawn(self) -> int:
        """Recipes in charts of curves."""
        return min(_MOST_DRAWN, len(self.ranked))


def _card(caption: str, *content: str, class_: str = "", **attributes: object) -> str:
    inside = [tag("figcaption", text(caption)), *content]
    return tag("figure", *inside, class_=f"card {class_}".strip(), **attributes)


def curve_figures(figures: Figures) -> tuple[dict[tuple[str, str], str], dict[str, Any]]:
    """Charts by figure and axis, and what their tips show, by name of the chart."""
    may = figures.comparison.comparable
    charts: dict[tuple[str, str], str] = {}
    data: dict[str, Any] = {}
    shown = [name for name, can in ((BITS, may.bits), (LOSS, may.loss)) if can]
    contenders = [each for each in figures.ranked[: figures.drawn] if each.runs]
    lines = sum(3 + len(each.runs) for each in contenders)
    most = _CURVE_CHARACTERS // (_CHARACTERS_A_POINT * 2 * len(AXES) * max(1, len(shown) * lines))
    for name in shown:
        for axis in AXES:
            series = _series(figures, contenders, name, axis, max(12, min(120, most)))
            if not series:
                continue
            chart = f"{name}-{axis}"
            drawing = both(_curves(series, axis, chart), height=380.0, narrow_height=300.0)
            card = _card(UNITS[name], drawing, class_="curves", data_figure=name, data_axis=axis)
            charts[name, axis] = card
            data[chart] = {"axis": axis, "series": [_tip(each) for each in series]}
    return charts, data


def _curves(series: list[Series], axis: str, chart: str) -> Callable[[Frame], str]:
    title = f"{chart.partition('-')[0]} against {axis}"
    return lambda frame: curves_chart(frame, series, axis, title=title, chart=chart)


def _series(
    figures: Figures, contenders: list[Contender], name: str, axis: str, most_points: int
) -> list[Series]:
    found = []
    for each in contenders:
        curves = [curve_of(run, name) for run in each.runs]
        known = [curve for curve in curves if curve.end(axis) is not None]
        band = band_of(known, axis, most_points)
        if band is not None:
            seeds = tuple(known) if 1 < len(known) <= _MOST_SEEDS_DRAWN else ()
            colour = figures.colours[each.key]
            found.append(Series(key=each.key, colour=colour, band=band, seeds=seeds))
    return found


def _tip(series: Series) -> dict[str, Any]:
    plain = series.band.plain()
    rounded = {
        name: None if values is None else [float(f"{value:.6g}") for value in values]
        for name, values in plain.items()
    }
    return {"key": series.key, "colour": colour_class(series.colour)} | rounded


def result_figures(figures: Figures) -> list[str]:
    """Every result beside its mean, and the difference of each pair."""
    comparison = figures.comparison
    name = comparison.figure
    if name is None:
        return []
    rows = [
        Row(
            label=each.key,
            colour=figures.colours[each.key],
            values=tuple(each.values(name)),
            mean=mean.value,
            interval=None
            if mean.half_width is None
            else (mean.value - mean.half_width, mean.value + mean.half_width),
            remark=f"{each.name}: {mean.value:.4f}",
        )
        for each in figures.ranked[:_MOST_ROWS]
        if (mean := comparison.mean(each)) is not None
    ]
    if not rows:
        return []
    caption = f"{UNITS[name]} at the end: each seed, the mean, its 95 % interval"
    found = [_rows(caption, rows, SHORT_UNITS[name], zero=False)]
    best = figures.ranked[0].key
    pairs = [_pair_row(figures, pair) for pair in comparison.pairs
             if pair.interval is not None and best in (pair.first, pair.second)]  # fmt: skip
    if pairs:
        caption = (
            "difference of the means with its 95 % interval, each for itself; dashed: no difference"
        )
        found.append(_rows(caption, pairs[:_MOST_ROWS], SHORT_UNITS[name], zero=True))
    return found


def _rows(caption: str, rows: list[Row], x_title: str, *, zero: bool) -> str:
    def draw(frame: Frame) -> str:
        return rows_chart(frame, rows, title=caption, x_title=x_title, zero=zero)

    return _card(caption, both(draw, height=0.0))


def _pair_row(figures: Figures, pair: Pair) -> Row:
    assert pair.difference is not None, "a pair with an interval has a difference"
    better = pair.first if pair.difference < 0 else pair.second
    return Row(
        label=f"{pair.first} {MINUS} {pair.second}",
        colour=figures.colours[better] if pair.significant else COLOURS,
        values=(),
        mean=pair.difference,
        interval=pair.interval,
        remark=words_of(pair, figures.comparison),
    )


def sweep_figure(figures: Figures) -> list[str]:
    """The result over the one number that the recipes differ in; nothing where they differ else."""
    comparison = figures.comparison
    leaves, name = comparison.leaves, comparison.figure
    if len(leaves) != 1 or name is None or len(comparison.contenders) < 3:
        return []
    places = dict(zip((each.key for each in comparison.contenders), leaves[0].values, strict=True))
    if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in places.values()):
        return []
    points = _points(figures, name, lambda each: float(places[each.key]))
    xs = [point.x for point in points]
    if len(points) < 3:
        return []
    x_log = min(xs) > 0 and max(xs) / min(xs) >= 8

    def draw(frame: Frame) -> str:
        return points_chart(
            frame, points, title=leaves[0].name, chart="sweep", x_title=leaves[0].name, x_log=x_log
        )

    caption = f"{UNITS[name]} at the end, over {leaves[0].name}"
    return [tag("h2", "The sweep"), _card(caption, both(draw, height=320.0, narrow_height=290.0))]


def _points(figures: Figures, name: str, place: Callable[[Contender], float]) -> list[Point]:
    found = []
    for each in figures.comparison.contenders:
        values = each.values(name)
        if (mean := mean_of(values)) is not None:
            found.append(
                Point(
                    key=each.key,
                    colour=figures.colours[each.key],
                    x=place(each),
                    values=tuple(values),
                    mean=mean,
                )
            )
    return found


def scaling_figure(figures: Figures) -> list[str]:
    """The fit of loss against compute, where there is one."""
    fit, name = figures.comparison.fit, figures.comparison.figure
    if fit is None or name is None:
        return []
    used = set(fit.compute.tolist())
    points = [point for point in _points(figures, name, _compute) if point.x in used]
    line = Line(
        xs=tuple(fit.grid.tolist()),
        ys=tuple(fit.curve.at(fit.grid).tolist()),
        low=() if fit.low is None else tuple(fit.low.tolist()),
        high=() if fit.high is None else tuple(fit.high.tolist()),
    )

    def draw(frame: Frame) -> str:
        return points_chart(
            frame, points, title="loss against compute", chart="scaling", x_title="compute, FLOP",
            x_log=True, line=line,
        )  # fmt: skip

    ends = fit.intervals or {}
    parts = [
        f"{word} = {value:.4g}"
        + (f" ({ends[at][0]:.4g} to {ends[at][1]:.4g})" if at in ends else "")
        for word, value, at in (
            ("E", fit.curve.e, "e"),
            ("A", fit.curve.a, "a"),
            ("alpha", fit.curve.alpha, "alpha"),
            (f"at {FURTHER:g} times the largest compute", fit.further, "further"),
        )
    ]
    words = f"L(C) = E + A (C / {fit.curve.c0:.3g} FLOP)^-alpha with {', '.join(parts)}."
    largest = f" Largest residual {float(abs(fit.residuals).max()):.2g}."
    remarks = "".join(f" {each[:1].upper()}{each[1:]}." for each in fit.remarks)
    drawing = both(draw, height=360.0, narrow_height=300.0)
    return [
        tag("h2", "Loss against compute"),
        tag("p", text(words + largest + remarks), class_="soft"),
        _card(f"{UNITS[name]} at the end", drawing),
    ]


def _compute(contender: Contender) -> float:
    run = next(run for run in contender.runs if run.flops_per_token)
    return round_to((run.flops_per_token or 0.0) * run.tokens)
