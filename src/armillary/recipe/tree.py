"""Walks a config tree that is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from armillary.foundation.component import Component
from armillary.recipe.fields import FieldInfo, element_of, fields_of, list_in
from armillary.recipe.outside import component_word


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One value of a tree that holds no further fields."""

    name: str
    """Dotted, as on the command line."""
    value: Any
    annotation: Any
    doc: str


def is_group(value: Any) -> bool:
    """Whether a value is a config dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def kind_of(value: Any, *, where: bool = True) -> str | None:
    """The word that names a component, with its file if it is the user's; None for plain groups."""
    return component_word(type(value), where=where) if isinstance(value, Component) else None


def leaves(tree: Any, prefix: str = "") -> Iterator[Leaf]:
    """All leaves, in order. A component gives a leaf of its own, valued by its name."""
    for name, info in fields_of(type(tree)).items():
        yield from _leaves_of(f"{prefix}{name}", getattr(tree, name), info.annotation, info)


def value_at(tree: Any, name: str) -> Any:
    """What stands at the dotted name of a leaf."""
    for word in name.split("."):
        tree = tree[int(word)] if isinstance(tree, tuple) else getattr(tree, word)
    return tree


def _leaves_of(name: str, value: Any, annotation: Any, info: FieldInfo) -> Iterator[Leaf]:
    elements = list_in(annotation)
    if is_group(value):
        kind = kind_of(value)
        if kind is not None:
            yield Leaf(name, kind, annotation, info.doc)
        yield from leaves(value, f"{name}.")
    elif isinstance(value, tuple) and any(map(is_group, value)):
        for index, part in enumerate(value):
            yield from _leaves_of(f"{name}.{index}", part, element_of(elements, index), info)
    else:
        yield Leaf(name, value, annotation, info.doc)
