"""Whether the checkpoints that are to be kept for their scores will have any."""

from __future__ import annotations

import math
from collections.abc import Iterator

from armillary.foundation.errors import Problem, UserError, nearest
from armillary.recipe.recipe import Recipe


def score_problems(recipe: Recipe) -> Iterator[Problem]:
    """What leaves `checkpoint.keep_best` with nothing to choose from.

    Args:
        recipe: of a known length.
    """
    saves = recipe.checkpoint
    if saves.keep_best <= 0 or min(recipe.validation.every, recipe.evaluation.every) < 0:
        return
    what = f"checkpoint.keep_best = {saves.keep_best}"
    try:
        names = recipe.data.held_out_names()
    except UserError:  # the corpus answers for itself
        return
    tasks = [task.name for task in recipe.evaluation.tasks]
    if saves.best_metric in tasks and saves.best_metric not in names:
        yield from _never_scored(recipe, what, "evaluation")
        return
    if not names:
        yield Problem(
            f"{what} and data.validation_fraction = 0: no text is held out that gives scores",
            "a share above 0, or checkpoint.keep_best = 0",
            "--data.validation-fraction 0.05",
        )
    elif saves.best_metric not in names:
        yield Problem(
            f"checkpoint.best_metric = {saves.best_metric!r} is no held-out set of this recipe"
            f"{' and none of its tasks' if tasks else ''}",
            ", ".join([*names, *tasks]),
            f"--checkpoint.best-metric {nearest(saves.best_metric, [*names, *tasks]) or names[0]}",
        )
    yield from _never_scored(recipe, what, "validation")


def _never_scored(recipe: Recipe, what: str, part: str) -> Iterator[Problem]:
    """A score is of the very step that is saved; the last step is looked at after its save.

    Args:
        part: of the recipe, whose looks give the score.
    """
    saves, steps = recipe.checkpoint, recipe.budget.total_steps
    looks: int = getattr(recipe, part).every
    periods = {"every": saves.every, "keep_every": saves.keep_every}
    periods["ephemeral_every"] = saves.ephemeral_every
    used = {name: every for name, every in periods.items() if every > 0} or {"every": saves.every}
    if any(looks > 0 and every > 0 and math.lcm(looks, every) < steps for every in used.values()):
        return
    saved = ", ".join(f"checkpoint.{name} = {every}" for name, every in used.items())
    yield Problem(
        f"{what} and no checkpoint has a score: with {part}.every = {looks} and {saved},"
        f" none of steps 1 to {steps - 1} is both looked at and saved",
        "steps that are looked at and saved, before the last; or checkpoint.keep_best = 0",
        _proposal(part, looks, [every for every in used.values() if 0 < every < steps], steps),
    )


def _proposal(part: str, looks: int, saves: list[int], steps: int) -> str:
    if saves:
        return f"--{part}.every {min(saves)}"
    if 0 < looks < steps:
        return f"--checkpoint.every {looks}"
    if steps < 2:
        return "--checkpoint.keep-best 0"
    every = max(1, steps // 10)
    return f"--{part}.every {every} --checkpoint.every {every}"
