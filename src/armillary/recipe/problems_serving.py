"""What keeps a trained model from being asked on a mesh. No torch."""

from __future__ import annotations

import dataclasses

from armillary.foundation.errors import Problem
from armillary.recipe.problems_mesh import (
    mesh_problems,
    rank_problems,
    ranks_wanted,
    too_few_ranks,
)
from armillary.recipe.recipe import Recipe


def serving_problems(recipe: Recipe, world_size: int, *, more_ranks: str = "") -> list[Problem]:
    """What keeps a model from being asked on so many ranks.

    Args:
        more_ranks: the option that asks for more than 1 rank, where none was given.
    """
    if recipe.parallel.cpu_offload:
        message = "parallel.cpu_offload = true keeps weights on the host for an optimizer"
        fix = "--parallel.cpu-offload false"
        return [Problem(message, "false, where nothing is trained", fix)]
    if more_ranks and world_size == 1 and (wanted := ranks_wanted(recipe)) > 1:
        return [too_few_ranks(recipe.parallel, wanted, more_ranks)]
    if found := rank_problems(recipe, world_size):
        return found
    grid = recipe.parallel.resolve(world_size).grid
    length = 2 * grid.cp * grid.tp  # whole rows are read, which need not divide
    budget = dataclasses.replace(recipe.budget, seq_len=length)
    return mesh_problems(dataclasses.replace(recipe, budget=budget), world_size)
