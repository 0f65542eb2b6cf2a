"""Says which parameters of a model are trained, and puts low-rank factors beside its matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from armillary.foundation.errors import Problem, UserError
from armillary.foundation.patterns import matches, pattern_problems
from armillary.models.layers.experts import Experts
from armillary.models.layers.linear import Linear
from armillary.models.layers.low_rank import WithLowRank
from armillary.models.tuning.config import TARGETS


def freeze(model: nn.Module, frozen: Sequence[str]) -> None:
    """Has all parameters trained but those of which a name matches a pattern. In place.

    A parameter of two names, a tied one, is frozen by either.

    Raises:
        UserError: a pattern matches nothing, or nothing is left to be trained.
    """
    named = _named_parameters(model)
    problems = pattern_problems("tuning.frozen", frozen, list(named))
    if problems:
        raise UserError(problems)
    for name, parameter in named.items():
        if matches(name, frozen):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise UserError(
            Problem(
                f"tuning.frozen = {list(frozen)} leaves no parameter to be trained",
                "patterns that match a part of the parameters",
                "--tuning.frozen '[\"embedding.weight\"]'",
            )
        )


def add_low_rank(
    model: nn.Module, *, rank: int, scale: float, targets: Sequence[str], trained: Sequence[str]
) -> None:
    """Freezes a model but for low-rank factors beside its targets, and what else is named.

    In place. The factors are parameters of the module that has the weight.

    Args:
        model: whole, before any pass.
        rank: of the factors.
        scale: of their product.
        targets: patterns of matrices, see `low_rank_targets`.
        trained: patterns of further parameters, which are trained themselves; one of two names, a
            tied one, by either.

    Raises:
        UserError: a pattern matches nothing.
    """
    possible = dict(low_rank_targets(model))
    named = _named_parameters(model)
    problems = [
        *pattern_problems("tuning.targets", targets, list(possible), TARGETS, what="matrix"),
        *pattern_problems("tuning.trained", trained, list(named)),
    ]
    if problems:
        raise UserError(problems)
    model.requires_grad_(False)
    for name, parameter in named.items():
        if matches(name, trained):
            parameter.requires_grad_()
    for name, (module, attribute) in possible.items():
        if matches(name, targets):
            module.add_low_rank(attribute, rank=rank, scale=scale)


def low_rank_targets(model: nn.Module) -> Iterator[tuple[str, tuple[WithLowRank, str]]]:
    """Matrices that can have factors: of linear layers by the module's name, of experts by that of
    the weight; with the module and the attribute that holds the weight."""
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            yield name, (module, "weight")
        elif isinstance(module, Experts):
            for attribute in module.low_rank_targets:
                yield f"{name}.{attribute}", (module, attribute)


def _named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By all names."""
    return dict(model.named_parameters(remove_duplicate=False))
