"""Repeat a step that the guard found bad: `armillary replay RUN`.

The state is made again from the newest checkpoint before the step, and the batch that was written
down goes through the model once more. Tells whether loss and gradient norm are what they were,
which module gave the first value that is not finite, and which gradients have some. The run is only
read. Values of its recipe may be changed for it: another mesh, --precision.compute float32.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from armillary.cli.parser import Parser
from armillary.foundation.errors import EXIT_FAILED, EXIT_FINISHED, Problem, UserError
from armillary.foundation.run_folder import RECIPE_FILE, named_run
from armillary.foundation.tell import seen_by_every_rank

if TYPE_CHECKING:
    from armillary.recipe.recipe import Recipe
    from armillary.training.replay import Replayed

_NAMES_SHOWN = 6


def add_arguments(parser: Parser) -> None:
    """Declares the command's own options."""
    parser.takes_recipe("RUN")
    parser.epilog = "RUN, the first word, is a run folder, or its name below runs."
    parser.add_argument(
        "--step", metavar="N", type=int, help="a bad step (default: the latest that was dumped)"
    )
    parser.add_argument(
        "--nproc", metavar="N", type=int, help="ranks to start here (default: as many as it had)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Repeats the step; 0 if it is bad again in the same way, else 1."""
    with seen_by_every_rank():
        folder, recipe = _run_of(arguments)
        nproc = _ranks_to_start(arguments, folder)
    if nproc > 1:
        from armillary.launch.local import launch

        return launch(arguments.argv, nproc)
    from armillary.parallel import process
    from armillary.telemetry.console import open_console
    from armillary.training.replay import replay

    is_main = process.is_main()
    with closing(open_console("off" if arguments.json else "auto", rank=process.rank())) as console:
        result = replay(recipe, folder, step=arguments.step, progress=console)
    if is_main:
        print(json.dumps(result.facts(), indent=1) if arguments.json else _page(result))
        sys.stdout.flush()
    return EXIT_FINISHED if result.reproduced else EXIT_FAILED


def _run_of(arguments: argparse.Namespace) -> tuple[Path, Recipe]:
    from armillary.recipe.overrides import apply, split_options
    from armillary.recipe.recipe import Recipe
    from armillary.recipe.toml import read_toml

    words, options = split_options(arguments.recipe_tokens)
    if len(words) != 1:
        raise UserError(
            Problem(
                f"{len(words)} runs are given", "one", "armillary replay RUN [--LEAF VALUE ...]"
            )
        )
    folder = named_run(Path(words[0]).expanduser())
    if not (folder / RECIPE_FILE).is_file():
        raise UserError(
            Problem(
                f"{folder} is not a run folder: no {folder / RECIPE_FILE}",
                "a folder that `armillary train` wrote",
                "armillary runs list",
            )
        )
    return folder, apply(Recipe(), [read_toml(folder / RECIPE_FILE)], options)


def _ranks_to_start(arguments: argparse.Namespace, folder: Path) -> int:
    """1 in a rank, which was started to be one itself."""
    if "RANK" in os.environ:
        return 1
    if arguments.nproc is None:
        from armillary.resilience.guard_dump import read_replay

        return read_replay(folder, arguments.step).world_size
    if arguments.nproc < 1:
        raise UserError(Problem(f"--nproc {arguments.nproc}", "1 or more", "--nproc 1"))
    return int(arguments.nproc)


def _page(result: Replayed) -> str:
    first, last = result.samples
    begun = f"step {result.begun_at}" if result.begun_at else "first weights"
    recorded, repeated = result.recorded, result.repeated
    lines = [
        f"step {result.step}, samples [{first}, {last}), from {begun} on",
        f"{'':14}  {'recorded':>12}  {'repeated':>12}",
    ]
    for name in ("kind", "loss", "gradient_norm"):
        values = (_cell(recorded[name]), _cell(repeated[name]))
        lines.append(f"{name.replace('_', ' '):14}  {values[0]:>12}  {values[1]:>12}")
    modules, gradients = repeated["modules"], repeated["gradients"]
    if repeated["kind"] == "not finite":
        for rank in gradients:
            where = modules.get(rank, "none; it is the loss itself, or a gradient")
            lines.append(f"rank {rank}: first module with an output that is not finite: {where}")
            if names := gradients[rank]:
                more = len(names) - _NAMES_SHOWN
                rest = f" and {more} more" if more > 0 else ""
                shown = ", ".join(names[:_NAMES_SHOWN])
                lines.append(f"rank {rank}: gradients not finite: {shown}{rest}")
    return "\n".join([*lines, _verdict(result)])


def _verdict(result: Replayed) -> str:
    if result.reproduced:
        return "reproduced, to the last bit" if result.bitwise else "reproduced"
    if result.same_recipe:
        return "not reproduced: look for a fault of the machine"
    return "not reproduced, and the recipe is not the one of the step: try that first"


def _cell(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"
