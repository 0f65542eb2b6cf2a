"""Lists recipes, shows one as TOML or value by value with sources, compares two."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from armillary.cli.parser import Parser
from armillary.foundation.errors import EXIT_FINISHED, Problem, UserError, nearest

if TYPE_CHECKING:
    from armillary.cli.recipe_arguments import Resolved
    from armillary.recipe.recipe import Recipe
    from armillary.recipe.registry import Card


def add_arguments(parser: Parser) -> None:
    """Adds `list`, `show` and `diff`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="all registered recipes, by family")
    listing.add_argument("--family", metavar="NAME", help="only those of a family, such as llama3")
    listing.add_argument("--gpus", metavar="N", type=int, help="only those for N GPUs; 0 is a CPU")
    listing.add_argument("--search", metavar="TEXT", help="only those whose name or line has it")
    show = actions.add_parser("show", help="one recipe as TOML, every value explained")
    show.takes_recipe()
    show.add_argument(
        "--step", metavar="N", type=int, help="of a run with stages, the recipe of step N"
    )
    show.add_argument("--explain", action="store_true", help="each value and where it comes from")
    difference = actions.add_parser("diff", help="the values that differ between two recipes")
    difference.takes_recipe("RECIPE RECIPE")
    for action in (listing, show, difference):
        action.add_argument("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Prints what was asked for."""
    actions = {"list": _list, "show": _show, "diff": _diff}
    document, text = actions[arguments.action](arguments)
    print(json.dumps(document, indent=2) if arguments.json else text)
    return EXIT_FINISHED


def _list(arguments: argparse.Namespace) -> tuple[Any, str]:
    from armillary.cli import recipes_text
    from armillary.recipe.registry import names

    every = [_row(name) for name in names()]
    rows = [row for row in every if _is_wanted(row, arguments)]
    if not rows:
        raise UserError(_nothing(every, arguments))
    order = recipes_text.families(every)
    rows.sort(key=lambda row: (order.index(row["family"]), row["gpus"] != 0))
    return rows, recipes_text.listing(rows)


def _row(name: str) -> dict[str, Any]:
    """What the list says of a recipe."""
    from armillary.recipe.registry import card, describe, get
    from armillary.recipe.stages import spans_of

    made, about = get(name), card(name)
    memory = _memory(made, about)
    tokens = sum(
        (span.last - span.first) * span.recipe.budget.batch_tokens for span in spans_of(made)
    )
    return {
        "name": name,
        "family": about.family,
        "gpus": about.gpus,
        "parameters": made.model.parameter_count(),
        "tokens": tokens,
        "gpu_bytes": None if memory is None else sum(memory.values()),
        "description": describe(name),
    }


def _memory(made: Recipe, about: Card) -> dict[str, float] | None:
    """Bytes of each GPU that a recipe is made for, by what they are for.

    None: it is for none, does not go on so many, or its model is none that the formula knows.
    """
    from armillary.models.dense import DenseDecoder
    from armillary.recipe.memory import peak_of
    from armillary.recipe.problems import problems

    if not about.gpus or not isinstance(made.model, DenseDecoder):
        return None
    if problems(made, about.gpus, data=False):
        return None
    return dataclasses.asdict(peak_of(made, about.gpus))


def _is_wanted(row: dict[str, Any], arguments: argparse.Namespace) -> bool:
    wanted = (arguments.search or "").lower()
    return (
        arguments.family in (None, row["family"])
        and arguments.gpus in (None, row["gpus"])
        and (wanted in row["name"].lower() or wanted in row["description"].lower())
    )


def _nothing(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> Problem:
    """Why no recipe is listed, and what there is."""
    from armillary.cli import recipes_text

    known = recipes_text.families(rows)
    if arguments.family not in (None, *known):
        best = nearest(arguments.family, known)
        fix = f"--family {best}" if best else "armillary recipes list"
        return Problem(f"there is no family {arguments.family!r}", ", ".join(known), fix)
    counts = sorted({row["gpus"] for row in rows if row["gpus"] is not None})
    return Problem(
        "no recipe is all that was asked for",
        f"--gpus {', '.join(map(str, counts))}; or another --family or --search",
        "armillary recipes list",
    )


def _show(arguments: argparse.Namespace) -> tuple[Any, str]:
    from armillary.cli.recipe_arguments import DEFAULT_RECIPE, resolve
    from armillary.recipe.plain import recipe_sha256, to_plain
    from armillary.recipe.toml import to_toml

    resolved = resolve(arguments.recipe_tokens, default=DEFAULT_RECIPE)
    whole = resolved
    if arguments.step is not None:
        resolved = resolved.at(arguments.step)
    if arguments.explain:
        return _explain(resolved, whole, arguments.step)
    document = {
        "name": resolved.name,
        "recipe_sha256": recipe_sha256(resolved.recipe),
        "recipe": to_plain(resolved.recipe),
    }
    return document, to_toml(resolved.recipe).rstrip()


def _explain(resolved: Resolved, whole: Resolved, step: int | None) -> tuple[Any, str]:
    """Each value with its origin; memory where the recipe is as it is registered.

    Args:
        resolved: the recipe that is explained, of a run with stages that of `step`.
        whole: the recipe of the run.
        step: what was typed.
    """
    from armillary.cli import recipes_text
    from armillary.recipe.explain import explain
    from armillary.recipe.registry import card, describe, get, names

    about, written = card(resolved.name), get(resolved.name)
    sources = about.sources
    if step is not None and whole.recipe == written:
        sources = _of_stage(written, resolved.recipe, step, sources)
        written = resolved.recipe
    is_known = resolved.name in names()
    facts = {
        "name": resolved.name,
        "description": describe(resolved.name) if is_known else "",
        "family": about.family,
        "gpus": about.gpus,
        "memory": _memory(written, about) if resolved.recipe == written else None,
        "leaves": [
            {"leaf": leaf.name, "value": leaf.value, "from": leaf.origin, "reason": leaf.reason}
            for leaf in explain(resolved.recipe, sources, written)
        ],
    }
    return facts, recipes_text.explanation(facts)


def _of_stage(
    written: Recipe, staged: Recipe, step: int, sources: Mapping[str, str]
) -> dict[str, str]:
    """The sources of a recipe at a step: what its stage changes has the stage's."""
    from armillary.recipe.diff import diff
    from armillary.recipe.explain import source_of

    if not written.stages:
        return dict(sources)
    source = source_of(f"stages.{written.stage_at(step)[0]}", sources)
    changed = {item.name: source for item in diff(written, staged) if item.in_second and source}
    return {**sources, **changed}


def _diff(arguments: argparse.Namespace) -> tuple[Any, str]:
    from armillary.cli.recipe_arguments import resolve_each
    from armillary.recipe.diff import diff

    resolved = resolve_each(arguments.recipe_tokens)
    if len(resolved) != 2:
        message = f"recipes diff compares two recipes, {len(resolved)} given"
        raise UserError(Problem(message, fix="armillary recipes diff starter starter-long"))
    first, second = resolved
    found = diff(first.recipe, second.recipe)
    document = [
        {"leaf": item.name, "first": _plain(item.first), "second": _plain(item.second)}
        for item in found
    ]
    rows = [("", first.name, second.name)]
    rows += [
        (item.name, _cell(item.first, item.in_first), _cell(item.second, item.in_second))
        for item in found
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows]
    return document, "\n".join(lines) if found else "no value differs"


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and value - value != 0 else value


def _cell(value: Any, present: bool) -> str:
    if not present:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
