"""Where a run begins: at nothing, or at a checkpoint that `--resume` asks for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from armillary.checkpoint import rng
from armillary.checkpoint.find import Found
from armillary.checkpoint.manifest import step_names, step_of
from armillary.checkpoint.places.place import Place
from armillary.checkpoint.state import restore_training
from armillary.checkpoint.store import CheckpointStore
from armillary.foundation.errors import EXIT_FINISHED, ArmillaryError, Problem, UserError
from armillary.foundation.files import write_atomically
from armillary.foundation.run_folder import RECIPE_FILE
from armillary.foundation.strict_json import parse_json
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
    run: str | None = None
    """The run's id, for its manifests; see `identity`."""
    notes: tuple[str, ...] = ()
    """What a partial load has left out, for people."""


def begin_anew(assembly: Assembly) -> Beginning:
    """Before the first step, with the weights as they were initialised."""
    rng.seed_all(assembly.recipe.seed, process.rank())
    position = Position(data_fingerprint=assembly.data.training.fingerprint)
    return Beginning(position=position, provenance={"from": "scratch"})


def restore(
    assembly: Assembly,
    store: CheckpointStore,
    found: Found,
    check: Callable[[], None] = lambda: None,
) -> Beginning:
    """Goes to where a checkpoint stands: weights, optimizers, position, random states.

    Args:
        assembly: to fill.
        store: that holds it.
        found: it.
        check: called between reads; may raise to leave, with the assembly half filled.

    Raises:
        UserError: the checkpoint is of another model or of other data.
    """
    own = is_own(found, store.place)
    if assembly.recipe.checkpoint.partial and not own:
        return _restore_what_fits(assembly, store, found)
    outer = {"outer": assembly.outer.state()}
    scalars, states = restore_training(
        store,
        found,
        assembly.model,
        assembly.optimizers.optimizers,
        further=outer,
        check=check,
    )
    position = _position(assembly, scalars, found)
    if states is not None:
        rng.restore(states)
    provenance = found.manifest["provenance"]
    return Beginning(
        position=position,
        provenance=provenance if own else _derived(found),
        resumed_from=found.step,
        saved_step=found.step if own else None,
    )


def _restore_what_fits(assembly: Assembly, store: CheckpointStore, found: Found) -> Beginning:
    """Weights and optimizer states that fit; a new run otherwise, from step 0 of its own data."""
    optimizers = assembly.optimizers.optimizers
    left_out = store.restore_what_fits(found, assembly.model, optimizers)
    assembly.outer.restart()
    notes = [f"checkpoint {found.path} {line}; they start anew" for line in left_out.lines()]
    loaded = f"loaded what fits of {found.path}; steps and data begin at 0"
    beginning = begin_anew(assembly)
    return replace(beginning, provenance=_derived(found), notes=(loaded, *notes))


def _derived(found: Found) -> dict[str, Any]:
    return {"from": found.path, "origin": found.manifest["provenance"]}


def _position(assembly: Assembly, scalars: dict[str, Any], found: Found) -> Position:
    fingerprint = assembly.data.training.fingerprint
    try:
        return Position.from_scalars(scalars, data_fingerprint=fingerprint, path=found.path)
    except TypeError as error:  # names that no version of ours has written
        raise UserError(Problem(f"{found.path} holds no position of a run: {error}")) from None


def is_own(found: Found, place: Place) -> bool:
    """Whether a checkpoint is one of the run's whose checkpoints lie there, and not set aside."""
    if step_of(found.name) is None:
        return False
    if found.place.local is not None and place.local is not None:
        return found.place.local.resolve() == place.local.resolve()
    return found.place.address == place.address


def require_budget(found: Found, recipe: Recipe, place: Place) -> None:
    """Refuses a checkpoint of a step that the budget does not reach, unless steps begin at 0."""
    steps = recipe.budget.total_steps
    begins_anew = recipe.checkpoint.partial and not is_own(found, place)
    if found.step > steps and not begins_anew:
        raise UserError(
            Problem(
                f"{found.path} is beyond the budget of {steps} steps",
                f"{found.step} steps or more",
                f"--budget.steps {found.step}",
            )
        )


def recipe_warning(found: Found, recipe: Recipe, run: Path) -> str | None:
    """How a recipe differs from that of the run a checkpoint is of, if it does.

    Args:
        run: the folder of the run that is about to begin.
    """
    if found.manifest["recipe_sha256"] == recipe_sha256(recipe):
        return None
    place = found.place.local
    beside = run if place is None else place.resolve().parent
    try:
        before = apply(Recipe(), [read_toml(beside / RECIPE_FILE)])
    except ArmillaryError:  # a checkpoint without its run, or a recipe of another version
        return None
    changed = [f"{one.name} ({one.first} -> {one.second})" for one in diff(before, recipe)]
    if not changed:
        return None
    more = len(changed) - _NAMES_SHOWN
    told = ", ".join(changed[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
    return f"the recipe is not the one of {found.path}: {told}"


def is_end(found: Found, place: Place, recipe: Recipe) -> bool:
    """Whether a run has no step left to take: its own checkpoint has the whole budget."""
    return found.step >= recipe.budget.total_steps and is_own(found, place)


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


def followed_before(folder: Path, place: Place, request: str, recipe: Recipe) -> int | None:
    """The step after which a run's checkpoints come from following this very request.

    None if it was not followed yet, or nothing has been saved since.
    """
    try:
        known = parse_json((folder / RESUMED_FILE).read_bytes())
        after = int(known["after"])
        same = (known["request"], known["recipe_sha256"]) == (request, recipe_sha256(recipe))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    newest = max(step_names(place), default=-1)
    return after if same and newest > after else None


def remember_followed(folder: Path, request: str, recipe: Recipe, after: int) -> None:
    """Notes that a request was followed and checkpoints above step `after` will come from it."""
    known = {"request": request, "recipe_sha256": recipe_sha256(recipe), "after": after}
    write_atomically(folder / RESUMED_FILE, json.dumps(known) + "\n")


def forget_followed(folder: Path) -> None:
    """A finished run has nothing left to go on with: asked again, the request is followed again."""
    (folder / RESUMED_FILE).unlink(missing_ok=True)
