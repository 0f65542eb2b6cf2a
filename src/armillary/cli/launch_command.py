"""Write a run as text for a cluster: an sbatch script, manifests for Kubernetes, and others.

The recipe, its mesh for that many ranks and the options are checked first; `--submit` hands the
file over. Each launcher's `--help` lists what it takes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import shutil
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

from armillary.cli.parser import Parser
from armillary.foundation.errors import EXIT_FINISHED, Problem, RunError, UserError
from armillary.launch.job import Job, name_of, option
from armillary.recipe.fields import FieldInfo, fields_of

LAUNCHERS = {
    "slurm": ("Slurm", "an sbatch script"),
    "kubernetes": ("Kubernetes", "a JobSet, or a TrainJob of Kubeflow Trainer"),
    "skypilot": ("SkyPilot", "a managed job of SkyPilot"),
    "torchrun": ("Torchrun", "one line for each machine"),
}
"""Module and class of each launcher, and what it writes."""

_TYPED = ("recipe",)
"""Fields that are no options: they come from the words of the recipe."""


def add_arguments(parser: Parser) -> None:
    """Adds a sub-command for each launcher, with its fields as options."""
    actions = parser.add_subparsers(dest="launcher", metavar="LAUNCHER", required=True)
    for name, (_, summary) in LAUNCHERS.items():
        action = actions.add_parser(name, help=summary, description=f"Writes {summary}.")
        action.takes_recipe()
        for field in _options(_class_of(name)):
            _add_option(action, field)
        action.add_argument(
            "--out", metavar="FILE", help="file to write (default: NAME and suffix)"
        )
        action.add_argument("--dry-run", action="store_true", help="print it, write nothing")
        action.add_argument("--submit", action="store_true", help="hand it over as well")
        action.add_argument("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Checks, writes or prints, and hands over if asked.

    Raises:
        UserError: with all problems of the recipe and of the options at once.
        RunError: the file was not written, or not taken.
    """
    job = _job(arguments)
    text = job.render()
    file = Path(arguments.out or f"{job.name}{job.suffix}")
    command = job.submission(str(file))
    if arguments.dry_run:
        print(_as_json(job, text, None, command) if arguments.json else text, end="")
        return EXIT_FINISHED
    if arguments.submit:
        _require(command)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        problem = Problem(f"cannot write {file}: {error.strerror}", fix="another --out FILE")
        raise RunError(problem) from error
    said = _submit(command) if arguments.submit else ""
    if arguments.json:
        print(_as_json(job, text, file, command), end="")
    else:
        print(f"wrote {file}: {job.nodes} machines, {job.world_size} ranks, run {job.folder}")
        print(said or f"next: {job.next_step(str(file))}")
    return EXIT_FINISHED


def _class_of(launcher: str) -> type[Job]:
    module = importlib.import_module(f"armillary.launch.{launcher}")
    found: type[Job] = getattr(module, LAUNCHERS[launcher][0])
    return found


def _options(job: type[Job]) -> list[FieldInfo]:
    return [field for name, field in fields_of(job).items() if name not in _TYPED]


def _add_option(parser: argparse.ArgumentParser, field: FieldInfo) -> None:
    """One field of a launcher as an option: numbers, texts, truth values, lists, choices."""
    keywords: dict[str, Any] = {"help": _help(field), "default": field.default}
    if field.annotation is bool:
        keywords["action"] = argparse.BooleanOptionalAction
    elif typing.get_origin(field.annotation) is tuple:
        keywords |= {"action": "append", "default": [], "metavar": "VALUE"}
    elif choices := typing.get_args(field.annotation):
        keywords["choices"] = choices
    else:
        keywords |= {
            "type": field.annotation,
            "metavar": "N" if field.annotation is int else "TEXT",
        }
    parser.add_argument(option(field.name), **keywords)


def _help(field: FieldInfo) -> str:
    """The field's line, with its default where that says something."""
    shown = field.default not in ("", (), 0) and "(default" not in field.doc
    text = f"{field.doc} (default: {str(field.default).lower()})" if shown else field.doc
    return text.replace("%", "%%")


def _job(arguments: argparse.Namespace) -> Job:
    from armillary.cli.recipe_arguments import DEFAULT_RECIPE, resolve
    from armillary.recipe.problems import problems

    resolved = resolve(arguments.recipe_tokens, default=DEFAULT_RECIPE)
    kind = _class_of(arguments.launcher)
    values = {field.name: getattr(arguments, field.name) for field in _options(kind)}
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    values["name"] = values["name"] or name_of(resolved.name)
    job = kind(recipe=tuple(arguments.recipe_tokens), **values)
    found = job.problems()
    sizes: list[int] = getattr(job, "world_sizes", [job.world_size])
    for world_size in sizes:
        found = found or problems(resolved.recipe, world_size, data=False)
    if found:
        raise UserError(found)
    return job


def _as_json(job: Job, text: str, file: Path | None, command: list[str]) -> str:
    document = {
        "launcher": job.kind,
        "name": job.name,
        "world_size": job.world_size,
        "run": job.folder,
        "file": None if file is None else str(file),
        "submission": command,
        "text": text,
    }
    return json.dumps(document, indent=1) + "\n"


def _require(command: list[str]) -> None:
    if not command:
        raise UserError(Problem("--submit: torchrun is started by hand, on each machine"))
    if shutil.which(command[0]) is None:
        raise UserError(
            Problem(
                f"--submit: there is no {command[0]} here",
                allowed="a machine from which jobs are submitted",
                fix="without --submit; then " + shlex.join(command) + " there",
            )
        )


def _submit(command: list[str]) -> str:
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        said = made.stderr.strip() or made.stdout.strip()
        raise RunError(Problem(f"{shlex.join(command)} failed: {said}"))
    print(made.stderr, file=sys.stderr, end="")
    return made.stdout.strip()
