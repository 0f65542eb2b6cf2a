"""Train a recipe: `armillary train [RECIPE]`; without a recipe, `starter`.

An interrupted run goes on where it stood when the same command is given again.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from armillary.cli.parser import Parser
from armillary.foundation.errors import Problem, UserError
from armillary.foundation.tell import seen_by_every_rank
from armillary.resilience.signals import StopRequest

if TYPE_CHECKING:
    from armillary.cli.recipe_arguments import Resolved


def add_arguments(parser: Parser) -> None:
    """Declares the command's own options."""
    parser.takes_recipe()
    parser.add_argument(
        "--run",
        metavar="DIR",
        help="run folder (default: runs/RECIPE-HASH, the same for the same recipe)",
    )
    parser.add_argument(
        "--nproc", metavar="N", type=int, help="ranks to start on this machine (default: 1)"
    )
    parser.add_argument(
        "--resume",
        metavar="WHAT",
        default="auto",
        help="auto (newest checkpoint that verifies), never, a step, or a path (default: auto)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Trains, in this process or in ranks started from here; returns the exit code.

    Raises:
        Stopped: a stop was asked for before there was anything to save.
    """
    with StopRequest() as stop:  # before torch is imported, which takes seconds
        nproc = _ranks_to_start(arguments)
        resolved = _resolve(arguments, nproc)
        if nproc == 1:
            from armillary.training.run_folder import default_run_folder
            from armillary.training.train import train

            folder = Path(arguments.run or default_run_folder(resolved.name, resolved.recipe))
            return train(
                resolved.recipe,
                name=resolved.name,
                folder=folder.expanduser(),
                resume=arguments.resume,
                stop=stop,
                checked=True,
            )
        stop.check()
    from armillary.launch.local import launch

    return launch(arguments.argv, nproc)


def _ranks_to_start(arguments: argparse.Namespace) -> int:
    """1 in a rank, which was started to be one itself."""
    return 1 if arguments.nproc is None or "RANK" in os.environ else int(arguments.nproc)


def _resolve(arguments: argparse.Namespace, nproc: int) -> Resolved:
    """The recipe, without problems; on several ranks it is the same on each.

    Raises:
        UserError: with all problems at once.
    """
    from armillary.cli.recipe_arguments import DEFAULT_RECIPE, resolve
    from armillary.recipe.problems import problems

    with seen_by_every_rank():
        if arguments.run is not None and not arguments.run.strip():
            raise UserError(Problem("--run is empty", "a folder", "--run DIR, or leave it out"))
        if nproc < 1:
            raise UserError(Problem(f"--nproc {nproc}", allowed="1 or more", fix="--nproc 1"))
        resolved = resolve(arguments.recipe_tokens, default=DEFAULT_RECIPE)
        world_size = nproc if nproc > 1 else int(os.environ.get("WORLD_SIZE", "1"))
        more_ranks = "--nproc" if arguments.nproc is None and "RANK" not in os.environ else ""
        if found := problems(resolved.recipe, world_size, more_ranks=more_ranks):
            raise UserError(found)
    return resolved
