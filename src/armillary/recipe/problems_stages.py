"""What makes a run of stages impossible: each is a recipe that has to be right. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from armillary.foundation.component import name_of
from armillary.foundation.errors import Problem, UserError
from armillary.recipe.recipe import Recipe
from armillary.recipe.stages import Span, Stage, in_stage, is_of_the_run, spans_of

_LARGEST = 2**63 - 1
"""Steps or tokens of a stage."""


def stage_problems(recipe: Recipe, ask: Callable[[Recipe], list[Problem]]) -> list[Problem]:
    """What is wrong with a recipe that has stages. What is wrong with all of them is told once.

    Args:
        ask: what is wrong with a recipe without stages.
    """
    if found := list(_of_the_list(recipe)):
        return found
    try:
        spans = spans_of(recipe)
    except UserError as error:
        return error.problems
    if found := [problem for span in spans for problem in _of_the_run(recipe, span)]:
        return found
    by_stage = [_of_stage(span, ask) for span in spans]
    told = Counter(problem for of_stage in by_stage for problem in dict.fromkeys(of_stage))
    return [problem for problem, count in told.items() if count == len(spans)] + [
        in_stage(span.name, problem)
        for span, of_stage in zip(spans, by_stage, strict=True)
        for problem in dict.fromkeys(of_stage)
        if told[problem] < len(spans)
    ]


def _of_the_list(recipe: Recipe) -> Iterator[Problem]:
    for name in ("steps", "tokens"):
        if (value := getattr(recipe.budget, name)) is not None:
            yield Problem(
                f"budget.{name} = {value:g}, and the recipe has stages, which say how long each is",
                "none",
                f"--budget.{name} none",
            )
    if not recipe.replicas.alone:
        yield Problem(
            "replicas.lighthouse is set, and the recipe has stages: groups cannot cross a border",
            "one of the two",
            "a run for each stage, begun with --resume PATH of the one before",
        )
    names = Counter(stage.name or str(index) for index, stage in enumerate(recipe.stages))
    for name, count in names.items():
        if count > 1:
            yield Problem(f"{count} stages are called {name!r}", "another name for each")
    for index, stage in enumerate(recipe.stages):
        yield from _length(index, stage)


def _length(index: int, stage: Stage) -> Iterator[Problem]:
    where = f"stages.{index}"
    if (stage.steps is None) == (stage.tokens is None):
        given = "both set" if stage.steps is not None else "both none: it has no length"
        message = f"{where}.steps and {where}.tokens are {given}"
        yield Problem(message, "one of them", f"--{where}.steps 1000")
    for name, value in (("steps", stage.steps), ("tokens", stage.tokens)):
        if value is not None and not 0 < value <= _LARGEST:  # nor is NaN
            message = f"{where}.{name} = {value} is out of range"
            yield Problem(message, "above 0, up to 2^63 - 1", f"--{where}.{name} 1000")


def _of_the_run(recipe: Recipe, span: Span) -> Iterator[Problem]:
    """What a stage sets and may not."""
    for option in recipe.stages[span.index].options():
        name = ".".join(option.path)
        if is_of_the_run(name):
            yield Problem(
                f"stage {span.name}: sets {name}, which is one for the whole run",
                fix=f"--{name.replace('_', '-')} for the run, or another run",
            )
    own, whole = span.recipe.model, recipe.model
    counts = own.parameter_count(), whole.parameter_count()
    if name_of(type(own)) != name_of(type(whole)) or counts[0] != counts[1]:
        yield Problem(
            f"stage {span.name}: makes another model, of {counts[0]:,} parameters, of that of the"
            f" run, which has {counts[1]:,}",
            "what changes no parameter: model.max_seq_len, model.rope_theta, model.rope_scaling",
        )


def _of_stage(span: Span, ask: Callable[[Recipe], list[Problem]]) -> list[Problem]:
    """What is wrong with the recipe of a stage; a schedule of its own has to fit into its steps."""
    of_schedule = []
    if span.has_own_schedule:
        of_schedule = span.recipe.schedule.problems(span.last - span.first)
    found = [p for p in ask(span.recipe) if not (of_schedule and p.message.startswith("schedule"))]
    return [*found, *of_schedule]
