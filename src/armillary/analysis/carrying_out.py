"""Carries out a plan: probes, then every run in turn, each a process of its own."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from armillary.analysis.contenders import Contender
from armillary.analysis.plan import Plan, Task, limited, probed, probing, speed_sign
from armillary.analysis.runs import read_run
from armillary.foundation.errors import (
    EXIT_BAD_INPUT,
    EXIT_FINISHED,
    EXIT_RUN_ME_AGAIN,
    ArmillaryError,
    Problem,
    RunError,
    Stopped,
)
from armillary.foundation.files import make_folder, write_atomically
from armillary.foundation.run_folder import CHECKPOINTS_FOLDER, EVENTS_FILE
from armillary.recipe.recipe import Recipe
from armillary.recipe.toml import to_toml
from armillary.telemetry.events import read_events
from armillary.telemetry.history import read_history

_LAST_WORDS_SECONDS = 120.0
"""How long a run that outlived a killed comparison may take to save its state."""
_LOOK_SECONDS = 0.2


class Ended(Protocol):
    """How a run's processes ended."""

    @property
    def exit_code(self) -> int:
        """Of the whole run."""

    @property
    def reason(self) -> str:
        """Of a failure, in one line."""

    @property
    def asked(self) -> bool:
        """Whether a signal asked this process to stop, and the run with it."""


Start = Callable[[list[str], int], Ended]
"""Runs `armillary ARGV` with so many ranks, and waits."""


def measure_probes(plan: Plan, start: Start, say: Callable[[str], None]) -> None:
    """Takes a few steps of each recipe, where the budget asks for figures that are not there yet.

    Raises:
        RunError: a recipe cannot be trained.
        Stopped: a stop was asked for.
    """
    for entry in plan.entries if plan.limit.needs_probe else ():
        if entry.key in plan.probes:
            continue
        sign = speed_sign(entry.recipe)
        for other in plan.entries:
            if other.key in plan.probes and speed_sign(other.recipe) == sign:
                plan.probes[entry.key] = dict(plan.probes[other.key])
        if entry.key in plan.probes:
            plan.save()
            continue
        say(f"probe of {entry.name}: a few steps, to see what the budget buys")
        folder, file = plan.folder / "probes" / entry.key, plan.folder / "probes" / "recipe.toml"
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier start, cut short
        make_folder(folder.parent)
        write_atomically(file, to_toml(probing(entry.recipe)))
        ended = start(["train", str(file), "--run", str(folder)], plan.nproc)
        _require_not_stopped(ended)
        if ended.exit_code != EXIT_FINISHED:
            raise RunError(_could_not_start(entry.name, ended))
        plan.probes[entry.key] = probed(list(read_events(folder / EVENTS_FILE)))
        shutil.rmtree(folder)
        plan.save()


def recipes_to_train(plan: Plan) -> dict[str, Recipe]:
    """The recipes under their budget, by key; probes are there."""
    return {
        each.key: limited(each.recipe, plan.limit, plan.probes.get(each.key))
        for each in plan.entries
    }


def train_all(
    plan: Plan,
    start: Start,
    say: Callable[[str], None],
    *,
    again_failed: bool = False,
    thin: bool = False,
) -> None:
    """Trains whatever of the plan has not ended; interrupted runs go on where they stood.

    Args:
        again_failed: start runs that failed once more.
        thin: delete the checkpoints of each run that has finished.

    Raises:
        RunError: a run ends before its first step, so that the others would too.
        Stopped: a stop was asked for; the same plan goes on.
    """
    tasks = plan.tasks()
    for number, task in enumerate(tasks, 1):
        code, folder = plan.ended.get(task.name), plan.run_folder(task)
        if code == EXIT_FINISHED and thin:
            shutil.rmtree(folder / CHECKPOINTS_FOLDER, ignore_errors=True)
        if code == EXIT_FINISHED or (code is not None and not again_failed):
            continue
        say(f"run {number} of {len(tasks)}: {task.entry.name}, seed {task.seed}")
        _wait_for_earlier(folder)
        argv = ["train", str(plan.recipe_file(task.entry)), "--run", str(folder)]
        ended = start([*argv, "--seed", str(task.seed)], plan.nproc)
        _require_not_stopped(ended)
        if ended.exit_code != EXIT_FINISHED and (
            ended.exit_code == EXIT_BAD_INPUT or not _took_a_step(folder)
        ):
            raise RunError(_could_not_start(f"{task.entry.name}, seed {task.seed},", ended))
        plan.ended[task.name] = ended.exit_code
        plan.save()
        if ended.exit_code == EXIT_FINISHED and thin:
            shutil.rmtree(folder / CHECKPOINTS_FOLDER, ignore_errors=True)


def checkpoint_bytes(plan: Plan) -> int:
    """What the checkpoints of all runs take on disk."""
    files = plan.folder.glob(f"runs/*/*/{CHECKPOINTS_FOLDER}/**/*")
    return sum(file.stat().st_size for file in files if file.is_file())


def contenders_in(plan: Plan) -> list[Contender]:
    """The recipes of a plan with all runs that have ended.

    Raises:
        UserError: a run cannot be read.
    """
    recipes = recipes_to_train(plan)
    by_key: dict[str, list[Task]] = {each.key: [] for each in plan.entries}
    for task in plan.tasks():
        if task.name in plan.ended:
            by_key[task.entry.key].append(task)
    return [
        Contender(
            key=entry.key,
            name=entry.name,
            recipe=recipes[entry.key],
            runs=tuple(
                read_run(plan.run_folder(task), plan.ended[task.name]) for task in by_key[entry.key]
            ),
        )
        for entry in plan.entries
    ]


def _require_not_stopped(ended: Ended) -> None:
    if ended.asked or ended.exit_code == EXIT_RUN_ME_AGAIN:
        raise Stopped("a signal")


def _took_a_step(folder: Path) -> bool:
    try:
        return read_history(folder).last_step > 0
    except (ArmillaryError, OSError, ValueError):
        return False


def _could_not_start(what: str, ended: Ended) -> Problem:
    why = ended.reason or f"exit code {ended.exit_code}"
    return Problem(f"{what} could not be trained: {why}", fix="the same command goes on from here")


def _wait_for_earlier(folder: Path) -> None:
    """A comparison that was killed leaves a run that saves its state, and holds the folder."""
    until = time.monotonic() + _LAST_WORDS_SECONDS
    while time.monotonic() < until:
        try:
            if read_history(folder).state() != "running":
                return
        except (ArmillaryError, OSError, ValueError):
            return
        time.sleep(_LOOK_SECONDS)
