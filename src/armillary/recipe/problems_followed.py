"""What is proposed, carried to its end: taken together, proposals are not refused in turn."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable

from armillary.foundation.errors import Problem, UserError
from armillary.recipe.overrides import Option, apply, split_options
from armillary.recipe.recipe import Recipe

_OF_THE_MESH = ("--parallel.", "--budget.", "--model.", "--no-model.", "--activation-checkpoint")
"""What options begin with that decide, together, whether a step can be divided between ranks."""

_ROUNDS = 6
"""Proposals that uncover a further problem, one after the other; more have not been seen."""

_Changes = dict[str, str | None]
"""Options and their values; None for one that takes none."""


def followed(
    recipe: Recipe, found: list[Problem], ask: Callable[[Recipe], list[Problem]]
) -> list[Problem]:
    """The problems, of which proposals also say what would be missed once they are taken.

    Args:
        recipe: that has the problems.
        found: the problems.
        ask: what is wrong with another recipe.
    """
    fixes = [_changes(problem) for problem in found]
    first = next((index for index, changes in enumerate(fixes) if changes), None)
    if first is None:
        return found
    touched: set[int] = set()
    corrected: dict[int, str] = {}
    for _ in range(_ROUNDS):
        told = {name: value for changes in fixes for name, value in changes.items()}
        try:
            changed = apply(recipe, options=[Option(name, value) for name, value in told.items()])
        except UserError:
            return found
        more = {name: value for each in ask(changed) for name, value in _changes(each).items()}
        news = {name: more[name] for name in more if (name, more[name]) not in told.items()}
        if not news:
            break
        for name, value in news.items():
            owners = [index for index, changes in enumerate(fixes) if name in changes]
            for index in owners or [first]:
                if value is not None and name in _changes(found[index]):
                    corrected[index] = value
                fixes[index][name] = value
                touched.add(index)
    return [
        dataclasses.replace(
            problem,
            allowed=_corrected(problem.allowed, corrected.get(index)),
            fix=_typed(fixes[index]),
        )
        if index in touched
        else problem
        for index, problem in enumerate(found)
    ]


def _corrected(allowed: str | None, value: str | None) -> str | None:
    """What was allowed as things are, and is not once the other proposals are taken."""
    return allowed if value is None else f"{allowed}; with the other proposals {value}"


def _changes(problem: Problem) -> _Changes:
    """The options that a problem proposes; none if it proposes something else."""
    try:
        words, options = split_options(shlex.split(problem.fix or ""))
    except ValueError:
        return {}
    names = [f"--{option.name}" for option in options]
    if words or not all(name.startswith(_OF_THE_MESH) for name in names):
        return {}
    return {option.name: option.value for option in options}


def _typed(changes: _Changes) -> str:
    words = []
    for name, value in changes.items():
        words += [f"--{name}"] if value is None else [f"--{name}", shlex.quote(value)]
    return " ".join(words)
