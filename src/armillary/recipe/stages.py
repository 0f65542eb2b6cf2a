"""Stages: a run whose recipe changes at given steps. Loads no torch.

Each stage is the recipe of the run with some leaves changed, for so many steps. A run without
stages is a run of one, so whoever asks for spans need not tell the two apart.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar

from armillary.foundation.errors import Problem, UserError
from armillary.recipe.fields import fields_of
from armillary.recipe.overrides import Option, apply, split_options

if TYPE_CHECKING:
    from armillary.recipe.recipe import Recipe

_OF_THE_RUN = (
    *("seed", "tuning", "optimizer", "optimizer.matrices", "budget.steps", "budget.tokens"),
    *("data.tokenizer", "data.validation_fraction", "parallel.device"),
)
"""Leaves that no stage sets: the state at its border would not fit, or held-out text be read."""
_GROUPS_OF_THE_RUN = (
    *("stages", "initial", "tuning", "replicas", "checkpoint", "telemetry", "watchdog"),
    "data.tokenizer",
)
"""Groups of which no stage sets a leaf: what they ask for outlives the borders."""

RATES = ("optimizer.lr", "optimizer.adamw_lr")
"""Leaves that, like those of `schedule`, give a stage a schedule of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Some steps of a run, with some leaves of the recipe changed. `steps` or `tokens` is set."""

    ALTERNATIVES: ClassVar[tuple[tuple[str, ...], ...]] = (("steps", "tokens"),)
    """Fields that exclude each other: an override of one sets the others to none."""

    name: str = ""
    """What messages and events call it; empty: its number, from 0."""
    steps: int | None = None
    """Optimizer steps of the stage."""
    tokens: float | None = None
    """Tokens of the stage, rounded up to whole steps."""
    set: tuple[str, ...] = ()
    """What is changed, as `leaf=value` each: `budget.seq_len=8192`."""

    def options(self) -> list[Option]:
        """What is changed, as if it was typed."""
        written = (each.partition("=") for each in self.set)
        return [Option(name.strip(), value if equals else None) for name, equals, value in written]

    def steps_of(self, batch_tokens: int) -> int:
        """Its steps, with so many tokens in each."""
        if self.steps is not None:
            return self.steps
        assert self.tokens is not None, "a recipe without problems has steps or tokens"
        return math.ceil(Fraction(self.tokens) / batch_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A stage in its run: which steps, with which recipe."""

    index: int
    """Its number, from 0."""
    name: str
    recipe: Recipe
    """The run's with the leaves of the stage, without stages; its budget has the run's steps."""
    first: int
    """Steps of the run before it."""
    last: int
    """Steps of the run at its end."""
    total_steps: int
    """Steps of the run."""
    has_own_schedule: bool
    """Whether the learning rate's schedule begins and ends with it; else it is the run's."""

    @property
    def is_last(self) -> bool:
        """Whether the run ends with it."""
        return self.last == self.total_steps

    def factor(self) -> Callable[[int], float]:
        """The learning rate's factor at a step of the run, for 0 <= step < total_steps."""
        if not self.has_own_schedule:
            return self.recipe.schedule.build(self.total_steps)
        own = self.recipe.schedule.build(self.last - self.first)
        return lambda step: own(step - self.first)


def spans_of(recipe: Recipe) -> tuple[Span, ...]:
    """The stages of a run in order; the recipe itself is the only one of a run without.

    Raises:
        UserError: what a stage sets is no leaf, or does not fit; names the stage.
    """
    if not recipe.stages:
        return (_whole(recipe),)
    plain = dataclasses.replace(recipe, stages=())
    names = [stage.name or str(index) for index, stage in enumerate(recipe.stages)]
    staged = list(zip(names, recipe.stages, strict=True))
    recipes = [_changed(plain, stage, name) for name, stage in staged]
    steps = [
        stage.steps_of(max(1, changed.budget.batch_tokens))
        for stage, changed in zip(recipe.stages, recipes, strict=True)
    ]
    ends, total = list(itertools.accumulate(steps)), sum(steps)
    return tuple(
        Span(
            index=index,
            name=name,
            recipe=_with_steps(recipes[index], total),
            first=ends[index] - steps[index],
            last=ends[index],
            total_steps=total,
            has_own_schedule=any(map(_is_of_schedule, stage.options())),
        )
        for index, (name, stage) in enumerate(staged)
    )


def _whole(recipe: Recipe) -> Span:
    """The only stage of a run without."""
    steps = recipe.budget.total_steps
    return Span(
        index=0,
        name="0",
        recipe=recipe,
        first=0,
        last=steps,
        total_steps=steps,
        has_own_schedule=False,
    )


def span_at(spans: tuple[Span, ...], step: int) -> Span:
    """The stage that a step is in, counting from 1; the last one beyond the end."""
    return next((span for span in spans if step <= span.last), spans[-1])


def _changed(recipe: Recipe, stage: Stage, name: str) -> Recipe:
    try:
        return apply(recipe, options=stage.options())
    except UserError as error:
        raise UserError([in_stage(name, problem) for problem in error.problems]) from None


def _with_steps(recipe: Recipe, steps: int) -> Recipe:
    budget = dataclasses.replace(recipe.budget, steps=steps, tokens=None)
    return dataclasses.replace(recipe, budget=budget)


def is_of_the_run(leaf: str) -> bool:
    """Whether a leaf is one for the whole run, which no stage sets."""
    return leaf in _OF_THE_RUN or leaf.startswith(tuple(f"{each}." for each in _GROUPS_OF_THE_RUN))


def in_stage(name: str, problem: Problem) -> Problem:
    """A problem of what a stage sets: options that are proposed are written as it writes them."""
    fix = problem.fix
    try:
        words, options = split_options(shlex.split(fix or ""))
    except ValueError:
        words, options = [], []
    if options and not words and all(map(_can_be_set, options)):
        fix = f"in its set: {', '.join(map(_as_set, options))}"
    return Problem(f"stage {name}: {problem.message}", problem.allowed, fix)


def _can_be_set(option: Option) -> bool:
    """Whether an option is a leaf, and not such a one as `--nproc`, and a stage may set it."""
    from armillary.recipe.recipe import Recipe

    return option.path[0] in fields_of(Recipe) and not is_of_the_run(".".join(option.path))


def _as_set(option: Option) -> str:
    leaf = ".".join(option.path)
    return leaf if option.value is None else f"{leaf}={option.value}"


def _is_of_schedule(option: Option) -> bool:
    return option.path[0] == "schedule" or ".".join(option.path) in RATES
