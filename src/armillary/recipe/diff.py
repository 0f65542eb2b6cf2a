"""What differs between two config trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from armillary.recipe.plain import leaf_value
from armillary.recipe.tree import Leaf, leaves


@dataclass(frozen=True, slots=True)
class Difference:
    """A leaf that is not the same in two trees."""

    name: str
    """Dotted, as on the command line."""
    first: Any
    """Its value in the first tree as plain data; None where `in_first` is false."""
    second: Any
    in_first: bool = True
    """Whether the first tree has the leaf: another component has other fields."""
    in_second: bool = True


def diff(first: Any, second: Any) -> list[Difference]:
    """Every leaf that differs, in the order of the trees."""
    ones = {leaf.name: leaf for leaf in leaves(first)}
    twos = {leaf.name: leaf for leaf in leaves(second)}
    found = []
    for name in _merged(list(ones), list(twos)):
        one, two = ones.get(name), twos.get(name)
        if one is None or two is None or _written(one) != _written(two):
            found.append(
                Difference(
                    name,
                    one and _written(one),
                    two and _written(two),
                    in_first=one is not None,
                    in_second=two is not None,
                )
            )
    return found


def _written(leaf: Leaf) -> Any:
    return leaf_value(leaf.value, leaf.annotation)


def _merged(ones: list[str], twos: list[str]) -> list[str]:
    """Both lists' names in their order; those of the second alone follow their group's."""
    merged, known = [], {*ones}
    rest = [name for name in twos if name not in known]
    for position, name in enumerate(ones):
        merged.append(name)
        group = name.partition(".")[0]
        if position + 1 == len(ones) or ones[position + 1].partition(".")[0] != group:
            merged += [other for other in rest if other.partition(".")[0] == group]
            rest = [other for other in rest if other.partition(".")[0] != group]
    return merged + rest
