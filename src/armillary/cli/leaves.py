"""Help for the values of a recipe."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from armillary.cli.recipe_arguments import resolve
from armillary.recipe.coerce import short_type
from armillary.recipe.plain import leaf_value
from armillary.recipe.tree import Leaf, leaves

_WIDTH = 100
_INDENT = " " * 8


def leaves_help(tokens: Sequence[str]) -> str:
    """Every value that can be set on the recipe that the tokens give, with its meaning."""
    resolved = resolve(tokens)
    lines = [f"values of {resolved.name} (as they are with what you have typed):"]
    group = None
    for leaf in leaves(resolved.recipe):
        if leaf.name.partition(".")[0] != group:
            group = leaf.name.partition(".")[0]
            lines.append("")
        lines.append(
            f"  --{leaf.name.replace('_', '-')} {short_type(leaf.annotation)}  [{_shown(leaf)}]"
        )
        if leaf.doc:
            lines += textwrap.wrap(
                leaf.doc, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT
            )
    return "\n".join(lines) + "\n"


def _shown(leaf: Leaf) -> str:
    value = leaf_value(leaf.value, leaf.annotation)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value) if value != "" else '""'
