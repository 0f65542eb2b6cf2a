"""The page of a comparison: one file, no network, its charts drawn here as SVG.

It reads without scripts; a little of it, inline, adds the choice of axes and what stands under the
pointer. Its policy forbids whatever would load something.
"""

from __future__ import annotations

import json
from importlib.resources import files

from armillary.analysis.comparison import Comparison
from armillary.analysis.curves import AXES, SMOOTHING
from armillary.analysis.page.charts import colour_class
from armillary.analysis.page.figures import (
    Figures,
    curve_figures,
    result_figures,
    scaling_figure,
    sweep_figure,
)
from armillary.analysis.page.svg import tag, text
from armillary.analysis.page.tables import leaves_list, main_table, pairs_table, runs_table
from armillary.analysis.significance import ALPHA
from armillary.analysis.verdict import DIFFERENT, UNITS, UNTOLD, verdict_of
from armillary.version import __version__

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_VIEW = "width=device-width, initial-scale=1"
_CLASSES = {DIFFERENT: "different", UNTOLD: "untold"}
_FIGURE_WORDS = {"bits_per_byte": "held-out text", "loss": "training loss"}
_AXIS_WORDS = {"tokens": "tokens", "flops": "FLOPs", "seconds": "time"}


def page_of(comparison: Comparison) -> str:
    """The whole document."""
    figures = Figures.of(comparison)
    curves, data = curve_figures(figures)
    body = [
        *_head(comparison, figures),
        _legend(figures),
        *_section("Results", _results_words(comparison), main_table(comparison, figures)),
        *result_figures(figures),
        *(_section("Loss on the way", _curve_words(figures), *_choices(curves), *curves.values())
          if curves else ()),
        *sweep_figure(figures),
        *scaling_figure(figures),
        *_section("What differs", "", leaves_list(comparison, figures)),
        *_section("Every run", "", runs_table(comparison, figures)),
        *(_section("Every pair", "", pairs_table(comparison)) if len(comparison.pairs) > 1 else ()),
        *_methods(comparison),
        tag("footer", text(f"Made by armillary {__version__}. This page needs no network.")),
    ]  # fmt: skip
    held = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return "\n".join([
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta name="viewport" content="{_VIEW}">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        tag("title", text(f"{comparison.title} - comparison")),
        f"<style>{_resource('page.css')}</style></head><body>",
        tag("main", *body),
        f'<script type="application/json" id="data">{held}</script>',
        f"<script>{_resource('page.js')}</script></body></html>\n",
    ])  # fmt: skip


def _resource(name: str) -> str:
    return files("armillary.analysis.page").joinpath(name).read_text("utf-8")


def _head(comparison: Comparison, figures: Figures) -> list[str]:
    verdict = verdict_of(comparison)
    kind = _CLASSES.get(verdict.kind, "same")
    if verdict.kind == DIFFERENT:  # in the colour of the best
        kind += f" {colour_class(figures.colours[figures.ranked[0].key])}"
    first, _, rest = verdict.text.partition(". ")
    statement = tag("b", text(first.rstrip(".") + "."))
    notes = tag("ul", *(tag("li", text(note)) for note in comparison.notes), class_="notes soft")
    return [
        tag("p", "Comparison of recipes", class_="over"),
        tag("h1", text(comparison.title)),
        tag("div", statement, *([tag("p", text(rest))] if rest else []),
            class_=f"verdict {kind}"),
        *([notes] if comparison.notes else []),
    ]  # fmt: skip


def _legend(figures: Figures) -> str:
    chips = []
    for contender in figures.comparison.contenders:
        inside = [
            tag("span", class_="swatch"),
            tag("span", text(contender.key), class_="key"),
            tag("span", text(contender.name)),
        ]
        colour = colour_class(figures.colours[contender.key])
        chip = tag("button", *inside, class_=f"chip {colour}", type="button", value=contender.key,
                   aria_pressed="false")  # fmt: skip
        chips.append(tag("li", chip))
    return tag("ul", *chips, class_="legend")


def _section(title: str, words: str, *content: str) -> list[str]:
    return [tag("h2", text(title)), *([tag("p", text(words), class_="soft")] if words else []),
            *content]  # fmt: skip


def _results_words(comparison: Comparison) -> str:
    return (
        "Means over seeds, ± half of the 95 % interval of the mean (Student's t). Lower losses are"
        " better." + ("" if comparison.figure else " Losses of these runs cannot be compared.")
    )


def _curve_words(figures: Figures) -> str:
    words = (
        "Thick: mean over seeds, with its 95 % interval from three on; thin: each seed. The first"
        " tenth of the way may lie above the chart."
    )
    if figures.drawn < len(figures.comparison.contenders):
        words += f" Only the {figures.drawn} recipes with the lowest means are drawn."
    return words


def _choices(curves: dict[tuple[str, str], str]) -> list[str]:
    """Buttons for what is drawn, against what."""
    shown = list(dict.fromkeys(figure for figure, _ in curves))
    groups = [_choice("figure", {each: _FIGURE_WORDS[each] for each in shown})]
    groups.append(_choice("axis", {axis: _AXIS_WORDS[axis] for axis in AXES}))
    return [tag("div", *groups, class_="views no-choice")]


def _choice(name: str, words: dict[str, str]) -> str:
    buttons = [
        tag("button", text(word), type="button", value=value, data_choice=name,
            aria_pressed="false")
        for value, word in words.items()
    ]  # fmt: skip
    return tag("div", *buttons, class_="choice", role="group")


def _methods(comparison: Comparison) -> list[str]:
    figure = "none" if comparison.figure is None else UNITS[comparison.figure]
    lines = [
        f"The verdict is about: {figure}. It was chosen before any result: bits per byte where all"
        " runs have scored the same held-out text, else the training loss where documents and"
        " tokenizer are the same, else nothing.",
        "Recipes with the same seeds are compared seed by seed with a paired t test, others with"
        f" Welch's t test, at a level of {ALPHA:g}; p-values of several pairs are adjusted after"
        " Holm. Runs that diverged or failed are counted and never dropped: losses are then not"
        " tested, but how often runs fail is, with Fisher's exact test.",
        f"The training loss is the mean over the last {SMOOTHING:.0%} of a run's tokens. Held-out"
        " curves are looks during the run at a part of the text; results are of all that was"
        " scored at the end.",
        "Time is that of the steps: no start, no looks, no building of data. Where recipes were"
        " trained for this comparison they took turns, each seed beginning with another one, so"
        " that a machine that slows down does so for all.",
        "Compute is the model's own arithmetic: attention counted causally, recomputation not.",
    ]
    if comparison.price_per_hour is not None:
        lines.append(
            f"Costs are steps and looks at {comparison.price_per_hour:g} an hour for all devices of"
            " a run."
        )
    return _section(
        "How to read this", "", *(tag("p", text(line), class_="soft") for line in lines)
    )
