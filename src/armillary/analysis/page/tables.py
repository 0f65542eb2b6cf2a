"""The tables of the page."""

from __future__ import annotations

from collections.abc import Sequence

from armillary.analysis.comparison import Comparison
from armillary.analysis.contenders import BITS, LOSS, Contender, shown
from armillary.analysis.page.charts import colour_class
from armillary.analysis.page.figures import Figures
from armillary.analysis.page.svg import tag, text
from armillary.analysis.runs import FINISHED, Run
from armillary.analysis.student import Mean, mean_of
from armillary.analysis.verdict import SHORT_UNITS, words_of
from armillary.telemetry.format import byte_count, duration, quantity

_LONGEST_VALUE = 120
_MOST_PAIRS = 1_000
_SHORT = {BITS: "bits/byte", LOSS: "nats/token"}
_NONE = "–"  # noqa: RUF001  # a dash


def main_table(comparison: Comparison, figures: Figures) -> str:
    """The recipes with their means, the lowest loss first."""
    header, rows = _columns(comparison), []
    best = figures.ranked[0]
    for each in figures.ranked:
        is_best = each is best and comparison.mean(each) is not None
        colour = colour_class(figures.colours[each.key])
        key = tag("span", text(each.key), class_="key")
        cells = [tag("td", f"{key} {text(each.name)}", class_="name")]
        cells += [
            tag("td", tag("span", cell), data_label=name)
            for name, cell in zip(header[1:], _cells(comparison, each), strict=True)
        ]
        rows.append(tag("tr", *cells, class_=f"{colour} best" if is_best else colour))
    return _table(header, rows, class_="main-table")


def _columns(comparison: Comparison) -> list[str]:
    may = comparison.comparable
    names = ["recipe", "runs"]
    names += ["bits per byte"] if may.bits else []
    names += ["training loss"] if may.loss else []
    names += ["tokens", "time", "tokens/s", "memory"]
    names += [] if comparison.price_per_hour is None else ["cost"]
    if comparison.target is not None:
        names.append(f"time to {comparison.target.value:.4g} {_SHORT[comparison.target.figure]}")
    return [*names, *_evaluations(comparison)]


def _evaluations(comparison: Comparison) -> list[str]:
    runs = (run for each in comparison.contenders for run in each.runs)
    return sorted({name for run in runs for name in run.evaluations})


def _cells(comparison: Comparison, contender: Contender) -> list[str]:
    values, may = contender.values, comparison.comparable
    cells = [text(f"{contender.count(FINISHED)} of {len(contender.runs)}")]
    cells += [_spread(mean_of(values(BITS)), 4)] if may.bits else []
    cells += [_spread(mean_of(values(LOSS)), 4)] if may.loss else []
    cells += [
        text(quantity(_middle(mean_of(values("tokens"))))),
        text(duration(_middle(mean_of(values("seconds"))))),
        text(quantity(_middle(mean_of(values("tokens_per_second"))))),
        text(byte_count(max(values("memory_bytes"), default=None))),
    ]
    if comparison.price_per_hour is not None:
        cost = _middle(mean_of(values(comparison.cost)))
        cells.append(_NONE if cost is None else f"{cost:.3g}")
    if comparison.target is not None:
        reached = comparison.target.reached[comparison.contenders.index(contender)]
        when = text(duration(_middle(reached.means["seconds"]))) if reached.runs else "never"
        whole = reached.runs in (0, len(contender.runs))
        cells.append(
            when if whole else f"{when} <small>{reached.runs}/{len(contender.runs)}</small>"
        )
    for name in _evaluations(comparison):
        found = [run.evaluations[name] for run in contender.runs if name in run.evaluations]
        cells.append(_spread(mean_of(found), 4))
    return cells


def _middle(mean: Mean | None) -> float | None:
    return None if mean is None else mean.value


def _spread(mean: Mean | None, digits: int) -> str:
    if mean is None:
        return _NONE
    width = "" if mean.half_width is None else f" <small>± {mean.half_width:.{digits}f}</small>"
    return f"{mean.value:.{digits}f}{width}"


def leaves_list(comparison: Comparison, figures: Figures) -> str:
    """Each leaf that differs, with the value that each recipe has."""
    if not comparison.leaves:
        return tag("p", "The recipes differ in no value but the seed.", class_="soft")
    items = []
    for row in comparison.leaves:
        values = []
        for contender, value in zip(comparison.contenders, row.values, strict=True):
            key = tag("span", text(contender.key), class_="key")
            colour = colour_class(figures.colours[contender.key])
            values.append(tag("span", f"{key} {text(_cut(shown(value)))}", class_=colour))
        items.append(tag("li", tag("code", text(row.name)), tag("div", *values)))
    return tag("ul", *items, class_="leaves")


def _cut(value: str) -> str:
    return value if len(value) <= _LONGEST_VALUE else value[: _LONGEST_VALUE - 1] + "…"


def runs_table(comparison: Comparison, figures: Figures) -> str:
    """Every run, whether it has a result or not."""
    header = ["run", "seed", "ended", "steps", "bits per byte", "training loss", "tokens/s", "time"]
    rows = []
    for contender in comparison.contenders:
        colour = colour_class(figures.colours[contender.key])
        for run in contender.runs:
            cells = [tag("td", tag("span", text(contender.key), class_="key"))]
            cells += [tag("td", cell) for cell in _run_cells(comparison, run)]
            rows.append(tag("tr", *cells, class_=colour))
    return tag("div", _table(header, rows), class_="scroll")


def _run_cells(comparison: Comparison, run: Run) -> list[str]:
    may = comparison.comparable
    ended = run.outcome + (f": {run.reason}" if run.reason else "")
    bits = _NONE if run.bits_per_byte is None or not may.bits else f"{run.bits_per_byte:.4f}"
    loss = _NONE if run.loss is None or not may.loss else f"{run.loss:.4f}"
    return [
        text(_NONE if run.seed is None else run.seed),
        text(_cut(ended)),
        f"{run.steps:,}",
        bits,
        loss,
        text(quantity(run.tokens_per_second)),
        text(duration(run.seconds)),
    ]


def pairs_table(comparison: Comparison) -> str:
    """Every pair in words; of very many, those with the lowest mean."""
    unit = SHORT_UNITS[comparison.figure or BITS]
    pairs = comparison.pairs
    best = comparison.ranked()[0].key
    if len(pairs) > _MOST_PAIRS:
        pairs = tuple(pair for pair in pairs if best in (pair.first, pair.second))[:_MOST_PAIRS]
    items = [
        tag("li", tag("b", text(f"{pair.first} and {pair.second}")), ": ",
            text(words_of(pair, comparison)))
        for pair in pairs
    ]  # fmt: skip
    listed = tag("ul", *items, class_="notes")
    if len(items) <= 6:
        return listed
    more = len(comparison.pairs) - len(items)
    rest = f"; {more:,} more are in the document" if more else ""
    summary = tag("summary", text(f"{len(items)} pairs, in {unit}{rest}"))
    return tag("details", summary, listed)


def _table(header: Sequence[str], rows: Sequence[str], class_: str | None = None) -> str:
    head = tag("thead", tag("tr", *(tag("th", text(name), scope="col") for name in header)))
    return tag("table", head, tag("tbody", *rows), class_=class_)
