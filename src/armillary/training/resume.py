"""Where a run begins: at nothing, or at a checkpoint that `--resume` asks for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from armillary.checkpoint import rng
from armillary.checkpoint.find import Found
from armillary.checkpoint.manifest import step_folders, step_name
from armillary.checkpoint.state import restore_training
from armillary.checkpoint.store import CheckpointStore
from armillary.foundation.errors import EXIT_FINISHED, ArmillaryError, Problem, UserError
from armillary.foundation.files import write_atomically
from armillary.foundation.run_folder import CHECKPOINTS_FOLDER, RECIPE_FILE
from armillary.parallel import process
from armillary.recipe.diff import diff
from armillary.recipe.overrides import apply
from armillary.recipe.plain import recipe_sha256
from armillary.recipe.recipe import Recipe
from armillary.recipe.toml import read_toml
from armillary.telemetry.history import read_history
from armillary.training.assembly import Assembly
from armillary.training.state import Position

RESUMED_FILE = "resumed.json"
_NAMES_SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Beginning:
    """Where a run stands before its first step in this process."""

    position: Position
    provenance: dict[str, Any]
    """From what the run was trained, for the manifests of its checkpoints."""
    resumed_from: int | None = None
    """Step of the checkpoint; None for a run that starts anew."""
    saved_step: int | None = None
    """The same, if it is one of the run's own, which need not be saved again."""


def begin_anew(assembly: Assembly) -> Beginning:
    """Before the first step, with the weights as they were initialised."""
    rng.seed_all(assembly.recipe.seed, process.rank())
    position = Position(data_fingerprint=assembly.data.training.fingerprint)
    return Beginning(position=position, provenance={"from": "scratch"})


def restore(assembly: Assembly, store: CheckpointStore, found: Found) -> Beginning:
    """Goes to where a checkpoint stands: weights, optimizers, position, random states.

    Raises:
        UserError: the checkpoint is of another model or of other data.
    """
    scalars, states = restore_training(store, found, assembly.model, assembly.optimizers.optimizers)
    position = Position.from_scalars(
        scalars, data_fingerprint=assembly.data.training.fingerprint, path=str(found.path)
    )
    if states is not None:
        rng.restore(states)
    provenance = found.manifest["provenance"]
    own = is_own(found, store.folder)
    return Beginning(
        position=position,
        provenance=provenance if own else {"from": str(found.path), "origin": provenance},
        resumed_from=found.step,
        saved_step=found.step if own else None,
    )


def is_own(found: Found, checkpoints: Path) -> bool:
    """Whether a checkpoint is one of the run's whose checkpoints lie there, and not set aside."""
    return found.path.resolve() == checkpoints.resolve() / step_name(found.step)


def require_budget(found: Found, recipe: Recipe) -> None:
    """Refuses a checkpoint of a step that the budget does not reach."""
    steps = recipe.budget.total_steps
    if found.step > steps:
        raise UserError(
            Problem(
                f"{found.path} is beyond the budget of {steps} steps",
                f"{found.step} steps or more",
                f"--budget.steps {found.step}",
            )
        )


def recipe_warning(found: Found, recipe: Recipe) -> str | None:
    """How a recipe differs from that of the run a checkpoint is of, if it does."""
    if found.manifest["recipe_sha256"] == recipe_sha256(recipe):
        return None
    try:
        before = apply(Recipe(), [read_toml(found.path.resolve().parents[1] / RECIPE_FILE)])
    except ArmillaryError:  # a checkpoint without its run, or a recipe of another version
        return None
    changed = [f"{one.name} ({one.first} -> {one.second})" for one in diff(before, recipe)]
    if not changed:
        return None
    more = len(changed) - _NAMES_SHOWN
    told = ", ".join(changed[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
    return f"the recipe is not the one of {found.path}: {told}"


def is_end(found: Found, checkpoints: Path, recipe: Recipe) -> bool:
    """Whether a run has no step left to take: its own checkpoint has the whole budget."""
    return found.step >= recipe.budget.total_steps and is_own(found, checkpoints)


def is_told(found: Found, folder: Path, recipe: Recipe) -> bool:
    """Whether all that this recipe has to tell of its end, scores and samples, is in the log."""
    if found.manifest["recipe_sha256"] != recipe_sha256(recipe):
        return False
    try:
        stop = read_history(folder).stop
    except (ArmillaryError, OSError, ValueError):
        return False
    return stop is not None and (stop["exit_code"], stop["step"]) == (EXIT_FINISHED, found.step)


# A request for another past than the newest is followed once. The same command, given again by a
# person or a scheduler, then goes on from what was saved since, as it does with `auto`.


def followed_before(folder: Path, request: str, recipe: Recipe) -> int | None:
    """The step after which a run's checkpoints come from following this very request.

    None if it was not followed yet, or nothing has been saved since.
    """
    try:
        known = json.loads((folder / RESUMED_FILE).read_text(encoding="utf-8"))
        after = int(known["after"])
        same = (known["request"], known["recipe_sha256"]) == (request, recipe_sha256(recipe))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    newest = max(step_folders(folder / CHECKPOINTS_FOLDER), default=-1)
    return after if same and newest > after else None


def remember_followed(folder: Path, request: str, recipe: Recipe, after: int) -> None:
    """Notes that a request was followed and checkpoints above step `after` will come from it."""
    known = {"request": request, "recipe_sha256": recipe_sha256(recipe), "after": after}
    write_atomically(folder / RESUMED_FILE, json.dumps(known) + "\n")


def forget_followed(folder: Path) -> None:
    """A finished run has nothing left to go on with: asked again, the request is followed again."""
    (folder / RESUMED_FILE).unlink(missing_ok=True)
