"""Train a recipe: `armillary train [RECIPE]`; without a recipe, `starter`.

An interrupted run goes on where it stood when the same command is given again.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from armillary.cli import ranks_wanted
from armillary.cli.parser import Parser
from armillary.foundation.errors import Problem, UserError
from armillary.foundation.restarts import RESTART_VARIABLE
from armillary.foundation.tell import seen_by_every_rank
from armillary.resilience.signals import StopRequest

if TYPE_CHECKING:
    from armillary.cli.ranks_wanted import RanksWanted
    from armillary.cli.recipe_arguments import Resolved


def add_arguments(parser: Parser) -> None:
    """Declares the command's own options."""
    parser.takes_recipe()
    parser.add_argument(
        "--run",
        metavar="DIR",
        help="run folder (default: runs/RECIPE-HASH, the same for the same recipe)",
    )
    ranks_wanted.add_arguments(parser)
    parser.add_argument(
        "--max-restarts",
        metavar="N",
        type=int,
        default=0,
        help="failures in a row after which the ranks here are started again (default: 0)",
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
        ranks = ranks_wanted.ranks_wanted(arguments)
        resolved = _resolve(arguments, ranks)
        folder = _folder(arguments, resolved)
        supervised = arguments.max_restarts > 0 and "RANK" not in os.environ
        if ranks.started and not supervised:
            from armillary.training.train import train

            return train(
                resolved.recipe,
                name=resolved.name,
                folder=folder,
                resume=arguments.resume,
                stop=stop,
                checked=True,
            )
        stop.check()
    from armillary.launch.local import launch
    from armillary.launch.supervisor import supervise

    argv, nproc, restarts = arguments.argv, ranks.nproc, arguments.max_restarts
    if supervised:
        return supervise(argv, nproc, folder, max_restarts=restarts, place=ranks.place)
    return launch(argv, nproc, place=ranks.place)


def _folder(arguments: argparse.Namespace, resolved: Resolved) -> Path:
    from armillary.training.run_folder import default_run_folder

    folder = Path(arguments.run or default_run_folder(resolved.name, resolved.recipe))
    return folder.expanduser()


def _resolve(arguments: argparse.Namespace, ranks: RanksWanted) -> Resolved:
    """The recipe, without problems; on several ranks it is the same on each.

    Raises:
        UserError: with all problems at once.
    """
    from armillary.cli.recipe_arguments import DEFAULT_RECIPE, resolve
    from armillary.recipe.problems import problems

    with seen_by_every_rank():
        if arguments.run is not None and not arguments.run.strip():
            raise UserError(Problem("--run is empty", "a folder", "--run DIR, or leave it out"))
        if not arguments.resume.strip():
            allowed = "auto, never, a step, or a path"
            raise UserError(Problem("--resume is empty", allowed, "--resume auto"))
        if found := [*ranks.problems(), *_restart_problems(arguments.max_restarts)]:
            raise UserError(found)
        resolved = resolve(arguments.recipe_tokens, default=DEFAULT_RECIPE)
        more_ranks = "--nproc" if arguments.nproc is None and "RANK" not in os.environ else ""
        if found := problems(resolved.recipe, ranks.world_size, more_ranks=more_ranks):
            raise UserError(found)
    return resolved


def _restart_problems(wanted: int) -> list[Problem]:
    """What is wrong with `--max-restarts`."""
    if wanted < 0:
        return [Problem(f"--max-restarts {wanted}", "0 or more", "--max-restarts 0")]
    if wanted and "RANK" in os.environ and RESTART_VARIABLE not in os.environ:
        return [
            Problem(
                f"--max-restarts {wanted}, and these ranks were not started by `armillary train`",
                "the same option of what started them",
                f"torchrun --max-restarts {wanted}",
            )
        ]
    return []
