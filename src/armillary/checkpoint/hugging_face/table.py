"""How a family's tensors are called and laid out elsewhere: a table that is read both ways.

A rule pairs names of ours with names of theirs and says how the tensors turn into each other. What
a rule makes is a view (`views.py`), so a table read in either direction reads no weights. The same
rules, applied to shapes alone, say what a folder has to hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from armillary.checkpoint.hugging_face import views
from armillary.checkpoint.hugging_face.source import Filled, Source, Sources


class Transform(ABC):
    """Tensors of theirs to tensors of ours, and back."""

    @abstractmethod
    def to_ours(self, theirs: Sequence[Source]) -> list[Source]:
        """Views of what a rule has on their side."""

    @abstractmethod
    def to_theirs(self, ours: Sequence[Source]) -> list[Source]:
        """The inverse."""


@dataclass(frozen=True, slots=True)
class Same(Transform):
    """Nothing but the name differs."""

    def to_ours(self, theirs: Sequence[Source]) -> list[Source]:
        """See `Transform.to_ours`."""
        return list(theirs)

    def to_theirs(self, ours: Sequence[Source]) -> list[Source]:
        """See `Transform.to_theirs`."""
        return list(ours)


@dataclass(frozen=True, slots=True)
class Transpose(Transform):
    """Theirs have the last two dims in the place of each other."""

    def to_ours(self, theirs: Sequence[Source]) -> list[Source]:
        """See `Transform.to_ours`."""
        return [views.Transposed(source) for source in theirs]

    def to_theirs(self, ours: Sequence[Source]) -> list[Source]:
        """See `Transform.to_theirs`."""
        return [views.Transposed(source) for source in ours]


@dataclass(frozen=True, slots=True)
class Stack(Transform):
    """Ours is one tensor, theirs are its parts along dim 0, one each: experts."""

    def to_ours(self, theirs: Sequence[Source]) -> list[Source]:
        """See `Transform.to_ours`."""
        return [views.Stacked(tuple(theirs))]

    def to_theirs(self, ours: Sequence[Source]) -> list[Source]:
        """See `Transform.to_theirs`."""
        (source,) = ours
        return [views.Indexed(source, index) for index in range(source.shape[0])]


@dataclass(frozen=True, slots=True)
class Weave(Transform):
    """Ours are n tensors, theirs is one in which they alternate along a dim."""

    n: int
    dim: int

    def to_ours(self, theirs: Sequence[Source]) -> list[Source]:
        """See `Transform.to_ours`."""
        (source,) = theirs
        return [views.Strand(source, self.dim, offset, self.n) for offset in range(self.n)]

    def to_theirs(self, ours: Sequence[Source]) -> list[Source]:
        """See `Transform.to_theirs`."""
        return [views.Woven(tuple(ours), self.dim)]


@dataclass(frozen=True, slots=True)
class Reorder(Transform):
    """Index i of ours is index order[i] of theirs, along a dim."""

    order: Tensor = field(repr=False)
    dim: int = 0

    def to_ours(self, theirs: Sequence[Source]) -> list[Source]:
        """See `Transform.to_ours`."""
        return [views.Reordered(source, self.dim, self.order) for source in theirs]

    def to_theirs(self, ours: Sequence[Source]) -> list[Source]:
        """See `Transform.to_theirs`."""
        inverse = torch.empty_like(self.order)
        inverse[self.order] = torch.arange(len(self.order))
        return [views.Reordered(source, self.dim, inverse) for source in ours]


@dataclass(frozen=True, slots=True)
class Chain(Transform):
    """One transform after the other, on the way to ours."""

    steps: tuple[Transform, ...]

    def to_ours(self, theirs: Sequence[Source]) -> list[Source]:
        """See `Transform.to_ours`."""
        sources = list(theirs)
        for step in self.steps:
            sources = step.to_ours(sources)
        return sources

    def to_theirs(self, ours: Sequence[Source]) -> list[Source]:
        """See `Transform.to_theirs`."""
        sources = list(ours)
        for step in reversed(self.steps):
            sources = step.to_theirs(sources)
        return sources


SAME = Same()


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a table."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    transform: Transform = SAME


def rename(ours: str, theirs: str, transform: Transform = SAME) -> Rule:
    """A rule between one tensor and one tensor."""
    return Rule((ours,), (theirs,), transform)


Names = Mapping[str, str]
"""Names of ours below some module, to names of theirs."""


def renames(ours: str, theirs: str, names: Names) -> list[Rule]:
    """Rules for all names below two prefixes."""
    return [rename(f"{ours}.{own}", f"{theirs}.{other}") for own, other in names.items()]


def to_ours(rules: Iterable[Rule], theirs: Sources) -> dict[str, Source]:
    """Our tensors as views of theirs; all that the rules name is there."""
    made: dict[str, Source] = {}
    for rule in rules:
        sources = rule.transform.to_ours([theirs[name] for name in rule.theirs])
        made |= zip(rule.ours, sources, strict=True)
    return made


def to_theirs(rules: Iterable[Rule], ours: Sources) -> dict[str, Source]:
    """Their tensors as views of ours; all that the rules name is there."""
    made: dict[str, Source] = {}
    for rule in rules:
        sources = rule.transform.to_theirs([ours[name] for name in rule.ours])
        made |= zip(rule.theirs, sources, strict=True)
    return made


Shapes = Mapping[str, tuple[int, ...]]


def shapes_of(sources: Sources) -> dict[str, tuple[int, ...]]:
    """Their shapes."""
    return {name: source.shape for name, source in sources.items()}


def their_shapes(rules: Iterable[Rule], ours: Shapes) -> dict[str, tuple[int, ...]]:
    """What theirs have to be, for ours of these shapes."""
    return shapes_of(to_theirs(rules, {name: Filled(shape) for name, shape in ours.items()}))


_NAMES_SHOWN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """What there is, against what there has to be."""

    missing: tuple[str, ...]
    """Names that are wanted and not there."""
    unexpected: tuple[str, ...]
    """Names that are there and have no place."""
    shapes: tuple[str, ...]
    """Names of another shape, with both."""

    @classmethod
    def between(cls, wanted: Shapes, found: Shapes) -> Difference:
        """Of names and shapes."""
        shapes = (
            f"{name} {list(found[name])} instead of {list(wanted[name])}"
            for name in wanted
            if name in found and found[name] != wanted[name]
        )
        return cls(
            missing=tuple(name for name in wanted if name not in found),
            unexpected=tuple(name for name in found if name not in wanted),
            shapes=tuple(shapes),
        )

    def lines(self) -> list[str]:
        """One line for each kind that there is, with the first names."""
        kinds = {
            "lacks": self.missing,
            "holds what the model has no place for": self.unexpected,
            "holds other shapes": self.shapes,
        }
        return [f"{words} ({len(n)}): {_listed(n)}" for words, n in kinds.items() if n]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
