"""Which parameters get what: by name, with shell-style patterns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from armillary.foundation.errors import Problem
from armillary.foundation.patterns import matches

if TYPE_CHECKING:
    from torch import nn

NO_DECAY = ("*norm.weight", "*bias", "*sinks", "embedding.weight")
"""Norms, biases, sinks and embeddings: what is not decayed unless the recipe says otherwise."""


class Named(Protocol):
    """A model as optimizers see it: a module, or what a rank holds of one."""

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Parameters by the names that the model's file gives them; tied ones once."""


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that are treated alike."""

    parameters: list[nn.Parameter]
    weight_decay: float


def named_parameters(model: Named) -> dict[str, nn.Parameter]:
    """Trainable parameters by the names that the model's file gives them; tied ones once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def whole_shapes(model: Named) -> Mapping[str, Sequence[int]]:
    """Shapes of all parameters of the whole model, of which this rank may hold a part.

    Patterns are checked against these, so that every rank refuses the same ones.
    """
    whole = getattr(model, "whole", None)
    if whole is None:
        return {name: p.shape for name, p in model.named_parameters()}
    shapes: Mapping[str, Sequence[int]] = whole.shapes
    return shapes


def split_by_decay(
    named: dict[str, nn.Parameter], no_decay: Sequence[str], weight_decay: float
) -> list[Group]:
    """At most two groups: with weight decay, then without."""
    decayed = [p for name, p in named.items() if not matches(name, no_decay)]
    plain = [p for name, p in named.items() if matches(name, no_decay)]
    return [g for g in (Group(decayed, weight_decay), Group(plain, 0.0)) if g.parameters]


def range_problems(checks: Iterable[tuple[str, object, bool, str]]) -> list[Problem]:
    """A problem for each (leaf, value, is right, what is allowed) that is not right."""
    return [
        Problem(f"{leaf} = {value}", allowed) for leaf, value, right, allowed in checks if not right
    ]
