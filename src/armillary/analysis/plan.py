"""The plan of a comparison: which runs, in which order, under which budget. A folder keeps it.

OUT/plan.json              what was asked for, what probes have measured, how runs have ended
OUT/recipes/A.toml         each recipe, whole, with its budget
OUT/runs/A/seed-0          a run folder as `armillary train` makes it
OUT/probes/A               a few steps, where a budget of FLOPs or seconds needs figures
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from armillary.analysis.contenders import key_of, told_apart
from armillary.checkpoint.config import Checkpoint
from armillary.foundation.errors import Problem, UserError
from armillary.foundation.files import make_folder, write_atomically
from armillary.foundation.strict_json import parse_json
from armillary.optim.schedule import Constant
from armillary.recipe.overrides import Option, apply
from armillary.recipe.plain import recipe_sha256
from armillary.recipe.recipe import Recipe
from armillary.recipe.toml import to_toml
from armillary.recipe.tree import leaves

PLAN_FILE = "plan.json"
VERSION = 1
_RUN = re.compile(r"([A-Z]{1,4})/seed-\d{1,20}")
LOOKS = 10
"""Looks at held-out text during a run whose recipe has none on the way."""
PROBE_STEPS = 16
_PROBED = 4
"""The first steps of a probe pay for memory and compilation, and are not counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """What every run may spend; `unit` is empty where each recipe keeps its own budget."""

    unit: str = ""
    """`steps`, `tokens`, `flops` or `seconds`."""
    amount: float = 0.0

    @property
    def needs_probe(self) -> bool:
        """Whether steps follow from what a probe measures."""
        return self.unit in ("flops", "seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A recipe of the plan."""

    key: str
    name: str
    recipe: Recipe
    """As asked for, before the budget."""

    def seeds(self, count: int) -> list[int]:
        """From the recipe's own on: recipes with the same one are compared pair by pair."""
        return [self.recipe.seed + number for number in range(count)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One run of the plan."""

    entry: Entry
    seed: int

    @property
    def name(self) -> str:
        """Below OUT/runs."""
        return f"{self.entry.key}/seed-{self.seed}"


@dataclass(kw_only=True, slots=True)
class Plan:
    """What is to be done in a folder, and what is known of it."""

    folder: Path
    entries: tuple[Entry, ...]
    seeds: int
    limit: Limit
    nproc: int
    probes: dict[str, dict[str, float]] = field(default_factory=dict)
    """By key: `flops_per_token`, `step_seconds`."""
    ended: dict[str, int] = field(default_factory=dict)
    """Exit code of each run that has ended for good, by `Task.name`."""
    command: str = ""
    """What was typed, and goes on with it."""

    def tasks(self) -> list[Task]:
        """Every run: seed after seed, and of each seed all recipes, each time another one first.

        So a machine that grows slower or faster with time does so for all recipes alike.
        """
        found = []
        for number in range(self.seeds):
            first = number % len(self.entries)
            turn = self.entries[first:] + self.entries[:first]
            found += [Task(entry=entry, seed=entry.recipe.seed + number) for entry in turn]
        return found

    def run_folder(self, task: Task) -> Path:
        """Of a run."""
        return self.folder / "runs" / task.name

    def recipe_file(self, entry: Entry) -> Path:
        """The recipe that the runs of an entry are started with."""
        return self.folder / "recipes" / f"{entry.key}.toml"

    def save(self) -> None:
        """Writes plan.json and the recipes whose budget is known."""
        make_folder(self.folder / "recipes")
        progress = {"probes": self.probes, "ended": self.ended}
        document = self._asked() | {"command": self.command} | progress
        write_atomically(self.folder / PLAN_FILE, json.dumps(document, indent=1) + "\n")
        for entry in self.entries:
            if not self.limit.needs_probe or entry.key in self.probes:
                recipe = limited(entry.recipe, self.limit, self.probes.get(entry.key))
                write_atomically(self.recipe_file(entry), to_toml(recipe))

    def load_progress(self) -> None:
        """Takes over what an earlier start of the same plan has found.

        Raises:
            UserError: the folder holds another comparison, or a broken plan.
        """
        path = self.folder / PLAN_FILE
        if not path.exists():
            if self.folder.is_dir() and any(self.folder.iterdir()):
                raise UserError(
                    Problem(f"--out {self.folder} is not empty", "a new folder", "another --out")
                )
            return
        document = read_plan(path)
        asked = self._asked()
        other = [name for name in asked if document.get(name) != asked[name]]
        if other:
            raise UserError(
                Problem(
                    f"{self.folder} holds another comparison: its {other[0]} differs",
                    "the command that began it, which goes on, or a new folder",
                    "another --out",
                )
            )
        self.probes, self.ended = document["probes"], document["ended"]

    def _asked(self) -> dict[str, Any]:
        entries = [
            {"key": each.key, "name": each.name, "sha256": recipe_sha256(each.recipe)}
            for each in self.entries
        ]
        return {
            "version": VERSION,
            "recipes": entries,
            "seeds": self.seeds,
            "budget": {"unit": self.limit.unit, "amount": self.limit.amount},
            "nproc": self.nproc,
        }


def read_plan(path: Path) -> dict[str, Any]:
    """The document in a plan file.

    Raises:
        UserError: it is broken.
    """
    try:
        document = parse_json(path.read_bytes())
        probes, ended = document["probes"], document["ended"]
        keys = {each["key"] for each in document["recipes"]}
        fine = (
            document["version"] == VERSION
            and isinstance(document["seeds"], int)
            and isinstance(document.get("command", ""), str)
            and all(_is_probe(probe) for probe in probes.values())
            and all(isinstance(code, int) for code in ended.values())
            and all((run := _RUN.fullmatch(name)) and run[1] in keys for name in ended)
            and all(isinstance(each["name"], str) for each in document["recipes"])
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(Problem(f"{path} is no plan of a comparison: {error}")) from None
    if not fine:
        raise UserError(Problem(f"{path} is a plan of another version", fix="another --out"))
    assert isinstance(document, dict)
    return document


def _is_probe(probe: Any) -> bool:
    return all(isinstance(probe[name], float) and probe[name] > 0.0 for name in PROBED)


PROBED = ("flops_per_token", "step_seconds")


def entries_of(words: Sequence[str], recipes: Sequence[Recipe]) -> tuple[Entry, ...]:
    """The recipes with their signs and names."""
    names = told_apart(words, recipes)
    return tuple(
        Entry(key=key_of(place), name=name, recipe=recipe)
        for place, (name, recipe) in enumerate(zip(names, recipes, strict=True))
    )


def limited(recipe: Recipe, limit: Limit, probe: dict[str, float] | None = None) -> Recipe:
    """The recipe under the budget, with looks at held-out text on the way.

    Raises:
        UserError: its stages say themselves how long they are.
    """
    if limit.unit:
        _refuse_stages(recipe)
    if limit.unit in ("steps", "tokens"):
        recipe = apply(recipe, [], [Option(f"budget.{limit.unit}", repr(limit.amount))])
    elif limit.unit:
        assert probe is not None, "a budget of FLOPs or seconds has been probed"
        steps = str(steps_within(limit, recipe.budget.batch_tokens, probe))
        recipe = apply(recipe, [], [Option("budget.steps", steps)])
    looks = recipe.validation.every or max(1, math.ceil(recipe.total_steps / LOOKS))
    return replace(
        recipe,
        validation=replace(recipe.validation, every=looks),
        checkpoint=replace(recipe.checkpoint, folder=""),  # each run has its own
        export=replace(recipe.export, folder=""),
    )


def _refuse_stages(recipe: Recipe) -> None:
    if recipe.stages:
        raise UserError(
            Problem(
                "a budget for all runs, and a recipe has stages, each with a length of its own",
                "stages of equal lengths in the recipes, and no budget for the comparison",
                "leave the budget out",
            )
        )


def steps_within(limit: Limit, batch_tokens: int, probe: dict[str, float]) -> int:
    """Whole steps that fit the budget best; 1 or more."""
    if limit.unit == "flops":
        return max(1, round(limit.amount / (probe["flops_per_token"] * batch_tokens)))
    return max(1, round(limit.amount / probe["step_seconds"]))


def probing(recipe: Recipe) -> Recipe:
    """A few steps of the recipe, and nothing after them.

    Raises:
        UserError: its stages say themselves how long they are.
    """
    _refuse_stages(recipe)
    short = apply(recipe, [], [Option("budget.steps", str(PROBE_STEPS))])
    return dataclasses.replace(
        short,
        validation=replace(short.validation, every=0, final_sequences=1),
        evaluation=type(short.evaluation)(),
        sampling=replace(short.sampling, prompts=()),
        schedule=Constant(),  # eight steps are too few for a warm-up of the run's
        checkpoint=Checkpoint(),
        export=type(short.export)(),
        telemetry=replace(short.telemetry, wandb=False, tensorboard=False, profile_from=0),
    )


def speed_sign(recipe: Recipe) -> tuple[tuple[str, str], ...]:
    """Equal for recipes that take the same time: they share a probe, whose noise is then no
    difference between them. Rates, factors, schedules and seeds cost no time."""
    return tuple(
        (leaf.name, repr(leaf.value))
        for leaf in leaves(probing(recipe))
        if leaf.name not in ("seed", "max_gradient_norm")
        and not (leaf.name.startswith("optimizer.") and isinstance(leaf.value, float))
    )


def probed(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What a budget needs, from the events of a probe."""
    start = next(event for event in events if event["kind"] == "start")
    times = [event["step_seconds"] for event in events if event["kind"] == "step"][_PROBED:]
    return {
        "flops_per_token": float(start["flops_per_token"]),
        "step_seconds": float(sorted(times)[len(times) // 2]),
    }
