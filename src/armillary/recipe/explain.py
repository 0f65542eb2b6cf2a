"""Where each value of a recipe comes from: a default, a source, or what was set over it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, Literal

from armillary.foundation.component import Component
from armillary.recipe.fields import fields_of
from armillary.recipe.plain import leaf_value
from armillary.recipe.tree import is_group, leaves

Origin = Literal["default", "source", "recipe", "set"]
"""default: as the class says; source: the recipe's, with a source; recipe: the recipe's, without
one; set: typed or in a file, over the recipe."""


@dataclass(frozen=True, slots=True)
class Explained:
    """A leaf of a recipe and where its value comes from."""

    name: str
    value: Any
    """As plain data."""
    origin: Origin
    reason: str
    """The source; for a default the leaf's doc; for what was set, what the recipe had."""


def explain(recipe: Any, sources: Mapping[str, str], written: Any) -> list[Explained]:
    """Every leaf of a recipe, in order.

    Args:
        recipe: the recipe as it will be used.
        sources: see `registry.Card`.
        written: the recipe before anything was set over it.
    """
    changed = set(changed_leaves(recipe))
    before = {leaf.name: leaf_value(leaf.value, leaf.annotation) for leaf in leaves(written)}
    found = []
    for leaf in leaves(recipe):
        value = leaf_value(leaf.value, leaf.annotation)
        source = source_of(leaf.name, sources)
        origin: Origin = "default"
        reason = leaf.doc
        if leaf.name not in before or before[leaf.name] != value:
            origin, reason = "set", _before(before.get(leaf.name))
        elif leaf.name in sources or (leaf.name in changed and source):
            origin, reason = "source", source
        elif leaf.name in changed:
            origin = "recipe"
        found.append(Explained(leaf.name, value, origin, reason))
    return found


def _before(value: Any) -> str:
    """What the recipe has where something else was set."""
    if value is None:
        return "the recipe has no such value"
    return "empty in the recipe" if value in ("", []) else f"{value} in the recipe"


def source_of(name: str, sources: Mapping[str, str]) -> str:
    """The source of a leaf, by the longest name in `sources` that is it or a group around it."""
    while name not in sources and "." in name:
        name = name.rpartition(".")[0]
    return sources.get(name, "")


def changed_leaves(recipe: Any) -> list[str]:
    """Names of the leaves whose value is not the default, in order.

    The defaults of a component are its own, whichever stands in its slot by default; then the
    leaf that names it is changed. A group or a list where by default there is none is changed in
    all its leaves.
    """
    return list(_changed(recipe, MISSING, ""))


def _changed(tree: Any, default: Any, prefix: str) -> Iterator[str]:
    """Of a group; `default` is one of the same class, or `MISSING`: that of its class counts."""
    for name, info in fields_of(type(tree)).items():
        value = getattr(tree, name)
        usual = info.default if default is MISSING else getattr(default, name)
        yield from _changed_value(value, usual, info.annotation, f"{prefix}{name}")


def _changed_value(value: Any, usual: Any, annotation: Any, name: str) -> Iterator[str]:
    if isinstance(value, tuple) and any(map(is_group, value)):
        for index, part in enumerate(value):
            yield from _changed_value(part, MISSING, None, f"{name}.{index}")
    elif not is_group(value):
        if usual is MISSING or leaf_value(value, annotation) != leaf_value(usual, annotation):
            yield name
    elif type(value) is type(usual):
        yield from _changed(value, usual, f"{name}.")
    elif isinstance(value, Component):
        yield name
        yield from _changed(value, MISSING, f"{name}.")
    else:
        for field, info in fields_of(type(value)).items():
            inner = getattr(value, field)
            yield from _changed_value(inner, MISSING, info.annotation, f"{name}.{field}")
