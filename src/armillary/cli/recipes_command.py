"""Lists recipes, shows one as TOML with everything applied that you type, compares two."""

from __future__ import annotations

import argparse
import json
from typing import Any

from armillary.cli.parser import Parser
from armillary.foundation.errors import EXIT_FINISHED, Problem, UserError


def add_arguments(parser: Parser) -> None:
    """Adds `list`, `show` and `diff`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="all registered recipes")
    show = actions.add_parser("show", help="one recipe as TOML, every value explained")
    show.takes_recipe()
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
    from armillary.recipe.registry import describe, names

    known = {name: describe(name) for name in names()}
    width = max(map(len, known))
    document = [{"name": name, "description": text} for name, text in known.items()]
    return document, "\n".join(f"{name:<{width}}  {text}" for name, text in known.items())


def _show(arguments: argparse.Namespace) -> tuple[Any, str]:
    from armillary.cli.recipe_arguments import DEFAULT_RECIPE, resolve
    from armillary.recipe.plain import recipe_sha256, to_plain
    from armillary.recipe.toml import to_toml

    resolved = resolve(arguments.recipe_tokens, default=DEFAULT_RECIPE)
    document = {
        "name": resolved.name,
        "recipe_sha256": recipe_sha256(resolved.recipe),
        "recipe": to_plain(resolved.recipe),
    }
    return document, to_toml(resolved.recipe).rstrip()


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
