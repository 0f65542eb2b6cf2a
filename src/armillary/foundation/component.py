"""Components: frozen dataclasses that can be swapped by name in a slot of the recipe.

A *slot* is a direct subclass of `Component`, for example `OptimizerConfig`. A component is a
dataclass that derives from a slot and is registered under a name:

    @component("lion")
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Lion(OptimizerConfig):
        lr: float = 1e-4
        \"\"\"Peak learning rate.\"\"\"

`--optimizer lion` then selects it, and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

C = TypeVar("C", bound="type[Component]")

_REGISTRY: dict[type, dict[str, type]] = {}
_NAMES: dict[type, str] = {}


class Component:
    """Base of every slot. Direct subclasses are slots; their registered subclasses are choices."""

    __slots__ = ()


def slot_of(cls: type) -> type:
    """The slot that a component class belongs to."""
    for base in cls.__mro__:
        if Component in base.__bases__:
            return base
    raise TypeError(f"{cls.__name__} does not derive from a slot (a direct subclass of Component)")


def is_slot(cls: object) -> bool:
    """Whether an annotation names a slot."""
    return isinstance(cls, type) and Component in cls.__bases__


def component(name: str) -> Callable[[C], C]:
    """Registers a dataclass as the choice `name` of its slot.

    Raises:
        TypeError: the class derives from no slot, or another class holds the name.
    """

    def register(cls: C) -> C:
        choices = _REGISTRY.setdefault(slot_of(cls), {})
        holder = choices.get(name)
        if holder is not None and not _is_same(holder, cls):
            raise TypeError(f"{_where(holder)} already holds the name {name!r}")
        choices[name] = cls
        _NAMES[cls] = name
        return cls

    return register


def _is_same(holder: type, cls: type) -> bool:
    """Whether a class is its holder read again; a user's file may be, from another place."""
    if holder.__module__ == cls.__module__ or not holder.__module__.startswith("armillary."):
        return holder.__qualname__ == cls.__qualname__
    return False


def _where(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def choices_of(slot: type) -> dict[str, type]:
    """Registered components of a slot, by name."""
    return dict(_REGISTRY.get(slot, {}))


def name_of(cls: type) -> str:
    """The name under which a component class is registered."""
    return _NAMES[cls]
