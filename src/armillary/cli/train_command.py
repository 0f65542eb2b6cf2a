"""Train a recipe: `armillary train [RECIPE]`; without a recipe, `starter`.

An interrupted run goes on where it stood when the same command is given again.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from armillary.cli.parser import Parser
from armillary.foundation.errors import Problem, UserError

DEFAULT_RECIPE = "starter"


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
    """Trains, in this process or in ranks started from here; returns the exit code."""
    from armillary.cli.recipe_arguments import resolve
    from armillary.recipe.problems import problems
    from armillary.training.run_folder import default_run_folder

    is_rank = "RANK" in os.environ
    resolved = resolve(arguments.recipe_tokens, default=DEFAULT_RECIPE)
    folder = Path(arguments.run or default_run_folder(resolved.name, resolved.recipe)).expanduser()
    if arguments.nproc is not None and not is_rank:
        found = problems(resolved.recipe, arguments.nproc) if arguments.nproc >= 1 else []
        if arguments.nproc < 1:
            found = [Problem(f"--nproc {arguments.nproc}", allowed="1 or more", fix="--nproc 1")]
        if found:
            raise UserError(found)
        if arguments.nproc > 1:
            from armillary.launch.local import launch

            return launch(sys.argv[1:], arguments.nproc)
    from armillary.training.train import train

    return train(resolved.recipe, name=resolved.name, folder=folder, resume=arguments.resume)
