"""A small config tree with every kind of field, for the tests of the recipe's machinery."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar, Literal

from armillary.foundation.component import Component, component


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Engine(Component):
    __slots__ = ()


@component("steam")
@dataclass(frozen=True, kw_only=True, slots=True)
class Steam(Engine):
    power: float = 1.5
    """Horsepower."""
    coal: int = 3
    """Tons
    a day.

    More here.
    """


@component("diesel")
@dataclass(frozen=True, kw_only=True, slots=True)
class Diesel(Engine):
    power: float = 9.0
    """Kilowatts."""
    label: str | None = None
    """Painted on it."""


class Load(Component):
    __slots__ = ()


@component("bulk")
@dataclass(frozen=True, kw_only=True, slots=True)
class Bulk(Load):
    tons: float = 1.0
    """Tons."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wagon:
    load: Load = Bulk()
    """What it carries."""
    weight: float = 1.0
    """Tons when empty."""


@component("mixed")
@dataclass(frozen=True, kw_only=True, slots=True)
class Mixed(Load):
    parts: tuple[Wagon, ...] = ()
    """Wagons within."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lamp:
    lumen: int = 100
    """Lumen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trip:
    ALTERNATIVES: ClassVar[tuple[tuple[str, ...], ...]] = (("hours", "kilometres"),)

    hours: int | None = None
    """Hours."""
    kilometres: float | None = 5.0
    """Kilometres."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    seed: int = 0
    """Of the lottery."""
    engine: Engine = Steam()
    """What pulls."""
    spare: Engine | None = None
    """What pulls otherwise."""
    load: Load = Bulk()
    """What it carries."""
    wagons: tuple[Wagon, ...] = ()
    """Behind the engine."""
    lamp: Lamp | None = None
    """In front."""
    trip: Trip = Trip()
    """How far."""
    gauges: tuple[float, float] = (0.9, 0.95)
    """Left and right."""
    stops: tuple[str, ...] = ()
    """Where it halts."""
    window: tuple[int, int] | None = None
    """From and to."""
    color: Color = Color.RED
    """Paint."""
    size: Literal["small", "large", 3] = "small"
    """Scale."""
    whistle_on: bool = True
    """Whether it whistles."""
    no_smoke: bool = False
    """Whether it does not smoke."""
    speed: int | Literal["auto"] = "auto"
    """Metres per second."""
