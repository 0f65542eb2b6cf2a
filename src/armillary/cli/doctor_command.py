"""What this machine is, what it can do, and what to change.

With `--cluster`, in ranks started by `--nproc`, by torchrun or on each machine of a job: whether
they are alike, how fast they exchange data over the axes of the recipe's mesh, and whether the run
folder is shared, fast and whole.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from armillary.cli import ranks_wanted
from armillary.cli.parser import Parser
from armillary.foundation.errors import EXIT_FAILED, EXIT_FINISHED, Problem, UserError
from armillary.foundation.progress import NoProgress

if TYPE_CHECKING:
    from armillary.telemetry.machine.finding import Finding


def add_arguments(parser: Parser) -> None:
    """Adds this command's arguments."""
    parser.takes_recipe()
    parser.add_argument("--cluster", action="store_true", help="look at the ranks of a run")
    parser.add_argument("--run", metavar="DIR", help="run folder to look at (default: runs)")
    ranks_wanted.add_arguments(parser)
    parser.add_argument("--quick", action="store_true", help="measure for a shorter time")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Prints the findings; 1 when something makes training impossible.

    Raises:
        UserError: the options do not fit.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        return _no_torch(error, as_json=arguments.json)
    if arguments.cluster:
        return _cluster(arguments)
    if arguments.recipe_tokens:
        fix = f"armillary doctor --cluster {' '.join(arguments.recipe_tokens)}"
        raise UserError(Problem("a recipe is looked at with --cluster only", fix=fix))
    from armillary.telemetry.machine.examine import examine

    return _show(examine(quick=arguments.quick, progress=NoProgress()), as_json=arguments.json)


def _cluster(arguments: argparse.Namespace) -> int:
    """As a rank, or by starting the ranks of this machine."""
    from armillary.cli import doctor_cluster

    ranks = ranks_wanted.ranks_wanted(arguments)
    if found := ranks.problems():
        raise UserError(found)
    recipe = doctor_cluster.recipe_of(arguments, ranks.world_size)
    if not ranks.started:
        from armillary.launch.local import launch

        return launch(arguments.argv, ranks.nproc, place=ranks.place)
    from armillary.parallel import process

    folder = doctor_cluster.folder_of(arguments)
    findings = doctor_cluster.examine_cluster(recipe, folder, quick=arguments.quick)
    if process.is_main():
        return _show(findings, as_json=arguments.json)
    failed = [found for found in findings if found.verdict == "fail"]
    return EXIT_FAILED if failed else EXIT_FINISHED


def _show(findings: Iterable[Finding], *, as_json: bool) -> int:
    """Prints findings as they come; returns the exit code."""
    seen = []
    for found in findings:
        seen.append(found)
        if not as_json:
            print(_line(found.name, found.verdict, found.text, found.advice), flush=True)
    verdicts = [found.verdict for found in seen]
    if as_json:
        document = {
            "verdict": next((v for v in ("fail", "warn") if v in verdicts), "ok"),
            "findings": [found.as_json() for found in seen],
        }
        print(json.dumps(document, indent=1))
    else:
        print(_summary(verdicts.count("warn"), verdicts.count("fail")))
    return EXIT_FAILED if "fail" in verdicts else EXIT_FINISHED


def _line(name: str, verdict: str, text: str, advice: str) -> str:
    line = f"{verdict:<5} {name:<12} {text}"
    return f"{line}\n{'':18} -> {advice}" if advice else line


def _summary(warnings: int, failures: int) -> str:
    if failures:
        return f"{failures} to repair before training can work, {warnings} to look at"
    if warnings:
        return f"ready to train; {warnings} to look at"
    return "ready to train"


def _no_torch(error: ImportError, *, as_json: bool) -> int:
    text, advice = f"cannot be imported: {error}", 'pip install "torch>=2.11,<2.14"'
    if as_json:
        found = {"name": "torch", "verdict": "fail", "text": text, "advice": advice, "values": {}}
        print(json.dumps({"verdict": "fail", "findings": [found]}, indent=1))
    else:
        print(_line("torch", "fail", text, advice))
        print(_summary(0, 1), file=sys.stdout)
    return EXIT_FAILED
