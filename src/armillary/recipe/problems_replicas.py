"""Whether replica groups can share the steps of a recipe. No torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from armillary.foundation.errors import Problem
from armillary.parallel.config import Parallel
from armillary.parallel.schedules import deal, takes
from armillary.recipe.recipe import Recipe


def replica_problems(recipe: Recipe, parallel: Parallel) -> Iterator[Problem]:
    """What keeps groups from training a recipe together.

    Args:
        recipe: whose batch can be dealt.
        parallel: its arrangement of one group, resolved.
    """
    replicas = recipe.replicas
    if replicas.alone:
        if replicas.mode.round_steps:
            yield Problem(
                "replicas.mode is one of groups that meet, and replicas.lighthouse is empty",
                allowed="HOST:PORT, where `armillary lighthouse` listens; or every-step",
                fix="--replicas.mode every-step",
            )
        return
    if importlib.util.find_spec("torchft") is None:
        yield Problem(
            "replicas.lighthouse needs the optional dependency group 'torchft'",
            fix='pip install "armillary[torchft]"',
        )
    longest = recipe.watchdog.step_seconds
    if recipe.watchdog.enabled and replicas.timeout_seconds >= longest:
        yield Problem(
            f"replicas.timeout_seconds = {replicas.timeout_seconds:g} is not below"
            f" watchdog.step_seconds = {longest:g}, after which the wait counts as a hang",
            allowed=f"below {longest:g}",
            fix=f"--replicas.timeout-seconds {longest / 2:g}",
        )
    if recipe.guard.policy.needs_checkpoints:
        yield Problem(
            "guard.policy goes back to a checkpoint, and of replica groups one has them",
            allowed="stop, skip",
            fix="--guard.policy stop",
        )
    yield from _schedule(recipe, parallel)


def _schedule(recipe: Recipe, parallel: Parallel) -> Iterator[Problem]:
    """Whether a pipeline can be fed whatever groups are there."""
    budget, groups = recipe.budget, recipe.replicas.groups
    sequences, ranks = budget.batch_tokens // budget.seq_len, parallel.grid.data_size * groups
    dealt = deal(parallel, sequences, ranks, budget.microbatch_sequences, uneven=budget.uneven)
    total = dealt.microbatches * groups
    for there in range(1, groups + 1):
        for share in {total // there, -(-total // there)}:
            if takes(parallel, share):
                continue
            yield Problem(
                f"parallel.schedule = {parallel.schedule} does not take {share} microbatches, which"
                f" a group has when {there} of replicas.groups = {groups} are there",
                allowed="a schedule that takes any number of microbatches",
                fix="--parallel.schedule 1F1B",
            )
            return
