"""A comparison on a terminal."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from armillary.analysis.comparison import Comparison, Equal
from armillary.analysis.contenders import BITS, LOSS, Contender, shown
from armillary.analysis.runs import FINISHED
from armillary.analysis.scaling import FURTHER
from armillary.analysis.student import Mean, mean_of
from armillary.analysis.verdict import UNITS, figure, verdict_of, words_of
from armillary.telemetry.format import UNKNOWN, byte_count, count_of, duration, quantity
from armillary.telemetry.text import printable

_WIDTH = 110
_MOST_PAIRS = 12
_LONGEST_VALUE = 40


def comparison_text(comparison: Comparison) -> str:
    """The verdict, the table, what differs, and what else is to be said."""
    blocks = [
        _wrapped(f"verdict: {verdict_of(comparison).text}"),
        _rendered(_main_table(comparison)),
        *_pairs(comparison),
        *_equal_losses(comparison),
        *_leaves(comparison),
        *_fit(comparison),
    ]
    if comparison.notes:
        blocks.append("\n".join(_wrapped(f"note: {note}") for note in comparison.notes))
    return "\n\n".join(block.rstrip() for block in blocks)


def _wrapped(text: str) -> str:
    return textwrap.fill(printable(text), _WIDTH, subsequent_indent="  ")


def _rendered(table: Table) -> str:
    """Plain text, as wide as it has to be: whoever pipes it wants no cell cut."""
    out = io.StringIO()
    Console(file=out, width=1_000, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines() if line.strip())


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for place, name in enumerate(header):
        table.add_column(name, justify="left" if place < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def _main_table(comparison: Comparison) -> Table:
    header = ["", "recipe", "runs", "bits/byte", "train loss", "tokens", "time", "tokens/s"]
    header += ["memory"]
    if comparison.price_per_hour is not None:
        header.append("cost")
    if comparison.target is not None:
        header.append(f"to {comparison.target.value:.4g}")
    rows = [_row(comparison, each) for each in comparison.ranked()]
    return _table(header, rows, left=2)


def _row(comparison: Comparison, contender: Contender) -> list[str]:
    values, may = contender.values, comparison.comparable
    cells = [
        contender.key,
        contender.name,
        f"{contender.count(FINISHED)}/{len(contender.runs)}",
        spread(mean_of(values(BITS))) if may.bits else "-",
        spread(mean_of(values(LOSS))) if may.loss else "-",
        quantity(_middle(mean_of(values("tokens")))),
        duration(_middle(mean_of(values("seconds")))),
        quantity(_middle(mean_of(values("tokens_per_second")))),
        byte_count(max(values("memory_bytes"), default=None)),
    ]
    if comparison.price_per_hour is not None:
        cost = _middle(mean_of(values(comparison.cost)))
        cells.append(UNKNOWN if cost is None else f"{cost:.4g}")
    if comparison.target is not None:
        place = comparison.contenders.index(contender)
        reached = comparison.target.reached[place]
        when = duration(_middle(reached.means["seconds"])) if reached.runs else "never"
        all_of_them = reached.runs in (0, len(contender.runs))
        cells.append(when if all_of_them else f"{when} ({reached.runs}/{len(contender.runs)})")
    return cells


def spread(mean: Mean | None) -> str:
    """A mean with its 95 % interval, as many digits as that leaves a meaning."""
    if mean is None:
        return UNKNOWN
    return f"{mean.value:.4f}" + ("" if mean.half_width is None else f" ± {mean.half_width:.4f}")


def _middle(mean: Mean | None) -> float | None:
    return None if mean is None else mean.value


def _pairs(comparison: Comparison) -> list[str]:
    """The pairs one by one, unless the verdict is the only one."""
    pairs = comparison.pairs
    if len(pairs) < 2:
        return []
    best = comparison.ranked()[0].key
    first = [pair for pair in pairs if best in (pair.first, pair.second)]
    lines = [
        _wrapped(f"{pair.first} and {pair.second}: {words_of(pair, comparison)}")
        for pair in first[:_MOST_PAIRS]
    ]
    if hidden := len(pairs) - len(lines):
        lines.append(f"and {count_of(hidden, 'more pair')}, in the document and on the page")
    return ["\n".join(lines)]


def _equal_losses(comparison: Comparison) -> list[str]:
    if not comparison.equals:
        return []
    rows = [
        [_at(equal), UNITS[equal.figure], *(spread(mean) for mean in equal.means)]
        for equal in comparison.equals
        if equal.axis != "flops" or not _is_of_one_size(comparison)
    ]
    header = ["equal", "", *(each.key for each in comparison.contenders)]
    return [_rendered(_table(header, rows, left=2))]


def _is_of_one_size(comparison: Comparison) -> bool:
    """Whether equal tokens are equal FLOPs."""
    runs = [run for each in comparison.contenders for run in each.runs]
    return len({run.flops_per_token for run in runs}) == 1


def _at(equal: Equal) -> str:
    if equal.axis == "seconds":
        return f"at {duration(equal.point)}"
    if equal.axis == "flops":
        return f"at {equal.point:.3g} FLOP"
    return f"at {quantity(equal.point)} tokens"


def _leaves(comparison: Comparison) -> list[str]:
    if not comparison.leaves:
        return ["the recipes differ in no value but the seed"]
    rows = [[row.name, *(_cut(shown(value)) for value in row.values)] for row in comparison.leaves]
    header = ["difference", *(each.key for each in comparison.contenders)]
    return [_rendered(_table(header, rows, left=1))]


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def _fit(comparison: Comparison) -> list[str]:
    fit = comparison.fit
    if fit is None:
        return []
    curve, ends = fit.curve, fit.intervals or {}

    def interval(name: str) -> str:
        return f" ({ends[name][0]:.4g} to {ends[name][1]:.4g})" if name in ends else ""

    text = (
        f"scaling over {fit.sizes} sizes: L(C) = E + A (C / {curve.c0:.3g} FLOP)^-alpha with"
        f" E = {curve.e:.4g}{interval('e')}, A = {curve.a:.4g}{interval('a')},"
        f" alpha = {curve.alpha:.4g}{interval('alpha')};"
        f" largest residual {figure(float(abs(fit.residuals).max()))};"
        f" at {FURTHER:g} times the largest compute {fit.further:.4g}{interval('further')}"
    )
    return ["\n".join(_wrapped(line) for line in (text, *(f"but {each}" for each in fit.remarks)))]
