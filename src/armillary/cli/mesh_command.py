"""Show who would hold what: `armillary mesh RECIPE --world 512`. Nothing is started or allocated.

Axes and groups of the ranks, the layers of each pipeline stage with their estimated share of the
work, and the parameters and bytes of each rank, gradients and optimizer state included.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

from armillary.cli.parser import Parser
from armillary.foundation.errors import EXIT_FINISHED, Problem, UserError

if TYPE_CHECKING:
    from armillary.cli.recipe_arguments import Resolved
    from armillary.parallel.account import Account


def add_arguments(parser: Parser) -> None:
    """Declares the command's own options."""
    parser.takes_recipe()
    parser.add_argument(
        "--world", metavar="N", type=int, help="ranks (default: as few as the degrees need)"
    )
    parser.add_argument(
        "--step", metavar="N", type=int, default=1, help="of a run with stages, the one of step N"
    )
    parser.add_argument("--rank", metavar="R", type=int, help="show all that this rank holds")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Prints the books of the mesh, or of one of its ranks."""
    resolved, world_size = _resolve(arguments)
    from armillary.cli import mesh_text
    from armillary.parallel.account import Account

    recipe = resolved.recipe
    account = Account(recipe.model, recipe.parallel, recipe.optimizer, world_size, recipe.tuning)
    facts = _facts(resolved, account, arguments.rank)
    if arguments.json:
        print(json.dumps(facts, indent=1))
    else:
        print(mesh_text.page(facts))
    return EXIT_FINISHED


def _resolve(arguments: argparse.Namespace) -> tuple[Resolved, int]:
    """The recipe and the number of ranks that it is for.

    Raises:
        UserError: with all problems at once.
    """
    from armillary.cli.recipe_arguments import DEFAULT_RECIPE, resolve
    from armillary.recipe.problems import problems

    resolved = resolve(arguments.recipe_tokens, default=DEFAULT_RECIPE).at(arguments.step)
    parallel = resolved.recipe.parallel
    least = math.prod(degree for degree in parallel.degrees.values() if degree > 0)
    world_size = least if arguments.world is None else arguments.world
    if world_size < 1:
        raise UserError(Problem(f"--world {world_size}", allowed="1 or more", fix="--world 8"))
    found = problems(resolved.recipe, world_size, data=False)
    if arguments.rank is not None and not 0 <= arguments.rank < world_size:
        found.append(
            Problem(f"--rank {arguments.rank}", allowed=f"0 to {world_size - 1}", fix="--rank 0")
        )
    if found:
        raise UserError(found)
    return resolved, world_size


def _facts(resolved: Resolved, account: Account, rank: int | None) -> dict[str, Any]:
    """All that is shown, as plain values."""
    parallel, grid = account.parallel, account.grid
    facts: dict[str, Any] = {
        "recipe": resolved.name,
        "world_size": grid.world_size,
        "axes": grid.axes,
        "data_size": grid.data_size,
        "parameters": resolved.recipe.model.parameter_count(),
        "schedule": parallel.schedule if parallel.pp > 1 else None,
        "stages": [
            {
                "stage": stage.index,
                "pipeline_rank": stage.rank,
                "layers": list(stage.layers),
                "cost_share": stage.cost,
            }
            for stage in account.stages()
        ],
    }
    axes = [axis for axis in _axes(resolved) if grid.degree(axis) > 1]
    if rank is None:
        facts["groups"] = {axis: list(grid.members(0, axis)) for axis in axes}
        facts["roles"] = [
            {"ranks": list(role.ranks), **_holdings(role.example)} for role in account.roles()
        ]
        return facts
    held = account.rank(rank)
    facts["rank"] = {
        "rank": rank,
        "data_rank": grid.data_rank(rank),
        "coordinates": held.coordinates,
        "groups": {axis: list(held.groups[axis]) for axis in axes},
        "receives_from": list(held.before),
        "sends_to": list(held.after),
        **_holdings(held),
        "tensors": [
            {
                "name": each.name,
                "shape": list(each.shape),
                "local_shape": list(each.local_shape),
                "moments": each.moments,
            }
            for each in held.parameters
        ],
    }
    return facts


def _axes(resolved: Resolved) -> tuple[str, ...]:
    """Axes that mean something for the model."""
    from armillary.parallel.grid import AXES, EXPERT_AXES

    experts = [axis for axis in EXPERT_AXES if axis not in ("pp", "dp_replicate")]
    has_experts = "ep" in resolved.recipe.model.divisors()
    return tuple(axis for axis in AXES if has_experts or axis not in experts)


def _holdings(held: Any) -> dict[str, Any]:
    return {
        "stages": {str(stage): list(layers) for stage, layers in held.stages.items()},
        "parameters": held.elements,
        "bytes": held.bytes,
    }
