"""The command line of those who ask a trained model: `RUN|CHECKPOINT [--LEAF VALUE ...]`."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from armillary.cli.parser import Parser
from armillary.foundation.errors import Problem, UserError
from armillary.foundation.run_folder import named_run

if TYPE_CHECKING:
    from armillary.recipe.overrides import Option


def takes_run(parser: Parser) -> None:
    """Declares the run, and the values of its recipe that may be changed."""
    parser.takes_recipe("RUN|CHECKPOINT")
    parser.epilog = (
        "RUN|CHECKPOINT, the first word, is a run folder, its name below runs, or a checkpoint in"
        " one;\nimported weights are a run folder too. --nproc N with --parallel.tp and the like"
        " spreads the model."
    )


def run_of(arguments: argparse.Namespace, command: str) -> tuple[Path, list[Option]]:
    """The run, and the values to put over its recipe's.

    Raises:
        UserError: there is not one run, or an option is none.
    """
    from armillary.recipe.fields import fields_of
    from armillary.recipe.overrides import split_options
    from armillary.recipe.recipe import Recipe

    words, options = split_options(arguments.recipe_tokens)
    if len(words) != 1:
        fix = f"armillary {command} RUN, then options"
        what = "no run is given" if not words else f"more than one run is given: {words[1]!r} too"
        raise UserError(Problem(what, "one, as the first word", fix))
    parts = fields_of(Recipe)
    unknown = [o.name for o in options if o.path[0].removeprefix("no_") not in parts]
    if unknown:
        own: Sequence[str] = getattr(arguments.recipe_tokens, "own_options", ())
        raise UserError([_unknown(name, own) for name in unknown])
    return named_run(Path(words[0]).expanduser()), options


def _unknown(name: str, own: Sequence[str]) -> Problem:
    close = difflib.get_close_matches(f"--{name}", own, n=1, cutoff=0.5)
    return Problem(f"there is no --{name}", fix=close[0] if close else None)
