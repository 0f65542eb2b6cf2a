"""Make a run of published weights: armillary import hf:OWNER/NAME, or a folder with config.json.

The run can be trained (train --from-file RUN/recipe.toml --run RUN), generated from, evaluated and
exported like any other; it stands at step 0 and holds weights alone.
"""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary.cli.parser import Parser
from armillary.foundation.errors import EXIT_FINISHED, Problem, UserError
from armillary.foundation.run_folder import RUNS_FOLDER

if TYPE_CHECKING:
    from armillary.training.importing import Imported

_EPILOG = """\
SOURCE, the first word, is hf:OWNER/NAME, hf:OWNER/NAME@REVISION, or a folder with config.json.
Any value of the run's recipe can be set: --model.vocab-size 152064, --model.predict-ahead.
  armillary export is the reverse"""
_DTYPES = ("bfloat16", "float16", "float32")


def add_arguments(parser: Parser) -> None:
    """Declares the command's own options."""
    parser.takes_recipe("SOURCE")
    parser.usage = f"{parser.prog} SOURCE [--LEAF VALUE ...] [options]"
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("--run", metavar="DIR", help="the run folder to make (runs/ and the model's name)")
    add("--dtype", default="", choices=_DTYPES, help="of the weights (as they are published)")
    add("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Makes the run and says what is in it."""
    from armillary.recipe.overrides import split_options

    words, options = split_options(arguments.recipe_tokens)
    if len(words) != 1:
        message = f"{len(words)} sources: {', '.join(words[:3])}" if words else "no source is given"
        raise UserError(Problem(message, "one: hf:OWNER/NAME, or a folder with config.json"))
    source = words[0]
    name = source.removeprefix("hf:").partition("@")[0].rstrip("/").rpartition("/")[2]
    folder = Path(arguments.run) if arguments.run else Path(RUNS_FOLDER, name or "imported")
    from armillary.telemetry.console import open_console
    from armillary.training.importing import import_run

    with closing(open_console()) as console:
        made = import_run(source, folder, options=options, dtype=arguments.dtype, progress=console)
    if arguments.json:
        print(json.dumps(_facts(made), indent=1))
    else:
        print("\n".join(_lines(made)))
    return EXIT_FINISHED


def _facts(made: Imported) -> dict[str, Any]:
    return {
        "run": str(made.folder),
        "source": made.source,
        "family": made.family,
        "parameters": made.parameters,
        "bytes_read": made.bytes_read,
        "bytes_written": made.bytes_written,
        "tokenizer": made.has_tokenizer,
        "checked": list(made.checked),
        "notes": list(made.notes),
    }


def _lines(made: Imported) -> list[str]:
    from armillary.telemetry.format import byte_count, quantity

    return [
        f"{made.folder}: {made.family} of {made.source}, {quantity(made.parameters)} parameters,"
        f" {byte_count(made.bytes_read)} read, {byte_count(made.bytes_written)} written",
        f"checked: {len(made.checked)} parts compute what a reference does",
        *(f"note: {note}" for note in made.notes),
    ]
