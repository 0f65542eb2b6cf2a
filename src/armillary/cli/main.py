"""`armillary COMMAND ...`: finds the command, runs it, and turns errors into words and exit codes.

Each command is a module with `add_arguments(parser: Parser) -> None` and
`run(arguments: argparse.Namespace) -> int`, where `arguments.argv` is the command line as given. It
is imported only when it is called or asked for help, so that `armillary --help` answers at once. A
module imports what is heavy, torch above all, inside `run`.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from armillary.cli.parser import HelpWanted, Parser
from armillary.foundation.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    ArmillaryError,
    Problem,
    Stopped,
    UserError,
    nearest,
)
from armillary.foundation.tell import tell
from armillary.version import __version__

TRACEBACK_VARIABLE = "ARMILLARY_TRACEBACK"


@dataclass(frozen=True, slots=True)
class Command:
    """A command and the module that holds it."""

    module: str
    summary: str


COMMANDS = {
    "train": Command("armillary.cli.train_command", "train a recipe; alone, it trains `starter`"),
    "recipes": Command(
        "armillary.cli.recipes_command", "list recipes, show one as TOML, compare two"
    ),
    "data": Command(
        "armillary.cli.data_command", "build, inspect and verify the tokens of a recipe"
    ),
    "mesh": Command(
        "armillary.cli.mesh_command", "who would hold what, on any number of ranks; starts nothing"
    ),
    "generate": Command("armillary.cli.generate_command", "write text with a trained model"),
    "eval": Command("armillary.cli.eval_command", "ask a trained model tasks"),
    "import": Command("armillary.cli.import_command", "make a run of published weights"),
    "export": Command(
        "armillary.cli.export_command", "write a run's weights as a folder that other tools load"
    ),
    "runs": Command("armillary.cli.runs_command", "list runs, show one"),
    "compare": Command(
        "armillary.cli.compare_command", "train recipes side by side, or take runs: who is better"
    ),
    "checkpoints": Command(
        "armillary.cli.checkpoints_command", "list, verify, compare, remove and pin checkpoints"
    ),
    "launch": Command("armillary.cli.launch_command", "write a run as text for a cluster"),
    "replay": Command("armillary.cli.replay_command", "repeat a step that the guard found bad"),
    "lighthouse": Command(
        "armillary.cli.lighthouse_command", "tell replica groups who of them is there"
    ),
    "doctor": Command(
        "armillary.cli.doctor_command", "what this machine can do, and what to do about it"
    ),
    "completion": Command("armillary.cli.completion_command", "print a shell completion script"),
}

_EPILOG = """\
start here:
  armillary train                                  a language model from this machine's own files
  armillary train debug --budget.steps 12          a run of seconds
  armillary recipes show starter                   all of a recipe's values, explained
  armillary train starter --optimizer.lr 1e-2      any of them, changed
  armillary COMMAND --help                         more about a command
exit codes: 0 finished, 1 failed, 2 wrong input, 75 stopped with its state saved: run it again"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    _print_any_text()
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except ArmillaryError as error:
        tell(str(error), every_rank_sees_it=error.seen_by_every_rank)
        if os.environ.get(TRACEBACK_VARIABLE) == "1":
            traceback.print_exc()
        return error.exit_code
    except Stopped as stopped:
        tell(str(stopped), every_rank_sees_it=True)
        return stopped.exit_code
    except KeyboardInterrupt:
        tell("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has left: `armillary recipes list | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as error:
        _report_unexpected(error)
        return EXIT_FAILED


def _print_any_text() -> None:
    """Has standard output escape what its encoding lacks, as standard error does anyway."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _run(argv: list[str]) -> int:
    if argv[:1] == ["help"] and len(argv) > 1:
        argv = [*argv[1:], "--help"]
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview().format_help(), end="")
        return EXIT_FINISHED if argv else EXIT_BAD_INPUT
    if argv[0] in ("-V", "--version"):
        print(f"armillary {__version__}")
        return EXIT_FINISHED
    if argv[0] not in COMMANDS:
        raise UserError(
            Problem(
                f"there is no command {argv[0]!r}",
                allowed=", ".join(COMMANDS),
                fix=_suggestion(argv[0]),
            )
        )
    parser = Parser(prog=f"armillary {argv[0]}")
    module = fill(argv[0], parser)
    try:
        arguments = parser.parse(argv[1:])
    except HelpWanted as wanted:
        print(_help(wanted), end="")
        return EXIT_FINISHED
    arguments.argv = argv
    return int(module.run(arguments))


def fill(name: str, parser: Parser) -> ModuleType:
    """Gives a parser the arguments of the command `name`; returns the command's module."""
    module = importlib.import_module(COMMANDS[name].module)
    parser.description = module.__doc__
    module.add_arguments(parser)
    return module


def overview() -> Parser:
    """The parser of the top level, which knows the commands' names but not their arguments."""
    parser = Parser(
        prog="armillary",
        usage="armillary COMMAND ...",
        description="Pre-trains large models, from a laptop to thousands of devices.",
        epilog=_EPILOG,
    )
    parser.add_argument("-V", "--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.summary, add_help=False)
    return parser


def _suggestion(word: str) -> str:
    best = nearest(word, COMMANDS)
    return f"armillary {best}" if best else "armillary --help"


def _help(wanted: HelpWanted) -> str:
    text = wanted.parser.format_help()
    if not wanted.recipe_tokens:
        return text
    from armillary.cli.leaves import leaves_help

    try:
        return text + "\n" + leaves_help(wanted.recipe_tokens)
    except ArmillaryError as error:  # help is shown whatever else was typed
        if wanted.parser.takes_recipes_alone:
            tell(str(error), every_rank_sees_it=True)
        return text


def _report_unexpected(error: Exception) -> None:
    if os.environ.get(TRACEBACK_VARIABLE) == "1":
        traceback.print_exc()
        return
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split()) or "no message"
    problem = Problem(
        f"unexpected {type(error).__name__}: {message} ({frame.filename}:{frame.lineno})",
        fix=f"again with {TRACEBACK_VARIABLE}=1 to see where it happened",
    )
    tell(problem.render())


if __name__ == "__main__":
    sys.exit(main())
