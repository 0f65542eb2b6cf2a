"""Where a run begins: at nothing, or at a checkpoint that `--resume` asks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from armillary.checkpoint import rng
from armillary.checkpoint.find import Found
from armillary.checkpoint.load import load_rest
from armillary.checkpoint.manifest import holds_weights_only, step_names, step_of
from armillary.checkpoint.places.place import Place
from armillary.checkpoint.ranks import Ranks
from armillary.checkpoint.state import restore_training
from armillary.checkpoint.store import CheckpointStore
from armillary.data.store import TokenStore
from armillary.foundation.errors import EXIT_FINISHED, ArmillaryError, Problem, UserError
from armillary.foundation.files import write_atomically
from armillary.foundation.run_folder import RECIPE_FILE
from armillary.foundation.strict_json import parse_json
from armillary.parallel import process
from armillary.recipe.diff import diff
from armillary.recipe.overrides import apply
from armillary.recipe.plain import recipe_sha256
from armillary.recipe.recipe import Recipe
from armillary.recipe.stages import Span, spans_of
from armillary.recipe.toml import read_toml
from armillary.telemetry.history import read_history
from armillary.training.assembly import Assembly, data_at
from armillary.training.evaluating import is_due
from armillary.training.initial import INITIAL, fill_from_checkpoint, fill_from_recipe
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
    told: tuple[str, ...] = ()
    """What else there is to say of the weights."""


def position_of(found: Found, recipe: Recipe, place: Place, ranks: Ranks) -> Position | None:
    """Where a checkpoint stands; None where steps and data begin at 0, with weights of it.

    Raises:
        UserError: it does not say.
        RunError: it could not be read.
    """
    in_part = recipe.checkpoint.partial and not is_own(found, place)
    if in_part or holds_weights_only(found.manifest):
        return None
    return Position.read(load_rest(found, ranks)[0], path=found.path)


def stage_of(position: Position, recipe: Recipe, path: str) -> Span:
    """The stage that a position is in. That of a border is in the stage before it.

    Raises:
        UserError: the stages up to there were of other lengths, or more.
    """
    spans, index = spans_of(recipe), len(position.borders)
    crossed = [step for step, _ in position.borders]
    if crossed == [span.last for span in spans[:-1]][:index] and position.step <= spans[index].last:
        return spans[index]
    ours = ", ".join(str(span.last) for span in spans[:-1]) or "none"
    theirs = ", ".join(map(str, crossed)) or "none"
    raise UserError(
        Problem(
            f"{path}, of step {position.step}, has come across the borders of stages at steps"
            f" {theirs}, and those of this recipe are at steps {ours}",
            "stages as they were, up to that step; those after it may change",
            f"undo the change, or begin a new run with --run DIR --initial.weights {path}",
        )
    )


def span_after(
    found: Found | None,
    recipe: Recipe,
    place: Place,
    ranks: Ranks,
    stores: Sequence[TokenStore],
    *,
    looked: bool = False,
) -> tuple[Span, list[int]]:
    """The stage that goes on from a checkpoint, and the cursors at the borders up to its beginning.

    Args:
        found: None: there is none, and the run begins.
        recipe: of the whole run.
        place: of the run's own checkpoints.
        ranks: all that ask.
        stores: of all stages.
        looked: whether a look that is due at the checkpoint's step was had, whatever it says.

    Raises:
        UserError: its stages were others, or counted over other data.
        RunError: it could not be read.
    """
    at = None if found is None else position_of(found, recipe, place, ranks)
    spans = spans_of(recipe)
    if found is None or at is None:
        return spans[0], []
    span = stage_of(at, recipe, found.path)
    looked = looked or at.looked_at == at.step or not is_look_due(span, at.step)
    cursors = [cursor for _, cursor in at.borders]
    if at.step < span.last or span.is_last or not looked:
        return span, cursors
    read = data_at(recipe, stores, cursors).training
    at.require_data(read.fingerprint, path=found.path)
    return spans[span.index + 1], [*cursors, at.cursor]


def is_look_due(span: Span, step: int) -> bool:
    """Whether a stage looks at its model after a step; the run's last one has a look of its own."""
    looks = (span.recipe.validation.every, span.recipe.evaluation.every)
    is_within = span.first < step < span.total_steps
    return is_within and any(is_due(every, step) for every in looks)


def begin_anew(assembly: Assembly) -> Beginning:
    """Before the first step, with the weights as they were initialised."""
    rng.seed_all(assembly.recipe.seed, process.rank())
    position = Position(data_fingerprint=assembly.data.training.fingerprint)
    return Beginning(position=position, provenance={"from": "scratch"})


def begin(assembly: Assembly, check: Callable[[], None] = lambda: None) -> Beginning:
    """Before the first step, with the weights that the recipe names; see `initial`."""
    beginning = begin_anew(assembly)
    if not assembly.recipe.initial.weights:
        return beginning
    filled = fill_from_recipe(assembly, check)
    return replace(beginning, provenance=filled.provenance, told=filled.notes)


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
    if holds_weights_only(found.manifest):
        filled = fill_from_checkpoint(assembly, found, check)
        beginning = replace(begin_anew(assembly), provenance=filled.provenance, told=filled.notes)
        return replace(beginning, resumed_from=0, saved_step=0) if own else beginning
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
    position = _taken_over(assembly, Position.read(scalars, path=found.path), found.path)
    if states is None:  # the mesh that wrote it had no such rank
        rng.seed_all(assembly.recipe.seed, process.rank())
    else:
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


def resumed_path(provenance: dict[str, Any]) -> str | None:
    """The checkpoint, of another run, that `--resume` began a run from; None: it did not."""
    is_resumed = "origin" in provenance and provenance.get("as") != INITIAL
    return provenance["from"] if is_resumed else None


def _taken_over(assembly: Assembly, position: Position, path: str) -> Position:
    """The position of a checkpoint in the stage that goes on from it, across its border perhaps.

    Raises:
        UserError: it counts over other data.
    """
    fingerprint = assembly.data.training.fingerprint
    if len(position.borders) == assembly.span.index:
        position.require_data(fingerprint, path=path)
        return position
    assert position.step == assembly.span.first, "a stage is entered at its border"
    return position.across(fingerprint)


def is_own(found: Found, place: Place) -> bool:
    """Whether a checkpoint is one of the run's whose checkpoints lie there, and not set aside."""
    if step_of(found.name) is None:
        return False
    if found.place.local is not None and place.local is not None:
        return found.place.local.resolve() == place.local.resolve()
    return found.place.address == place.address


def require_budget(found: Found, recipe: Recipe, place: Place) -> None:
    """Refuses a checkpoint of a step that the budget does not reach, unless steps begin at 0."""
    steps = recipe.total_steps
    begins_anew = recipe.checkpoint.partial and not is_own(found, place)
    if found.step > steps and not begins_anew:
        raise UserError(
            Problem(
                f"{found.path} is beyond the budget of {steps} steps",
                f"{found.step} steps or more",
                longer(recipe, found.step),
            )
        )


def longer(recipe: Recipe, steps: int) -> str:
    """The option that makes a run longer, to so many steps."""
    if not recipe.stages:
        return f"--budget.steps {steps}"
    last = spans_of(recipe)[-1]
    return f"--stages.{last.index}.steps {max(1, steps - last.first)}"


def recipe_warning(found: Found, recipe: Recipe, run: Path) -> str | None:
    """How a recipe differs from that of the run a checkpoint is of, if it does.

    Args:
        run: the folder of the run that is about to begin.
    """
    if found.manifest["recipe_sha256"] == recipe_sha256(recipe):
        return None
    if holds_weights_only(found.manifest):  # nobody has trained with that recipe
        return None
    before = _recipe_beside(found, run)
    if before is None:
        return None
    changed = [f"{one.name} ({one.first} -> {one.second})" for one in diff(before, recipe)]
    if not changed:
        return None
    more = len(changed) - _NAMES_SHOWN
    told = ", ".join(changed[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
    return f"the recipe is not the one of {found.path}: {told}"


def _recipe_beside(found: Found, run: Path) -> Recipe | None:
    """The recipe of the run a checkpoint is of; of `run` where that is elsewhere.

    None for a checkpoint without its run, or a recipe of another version.
    """
    place = found.place.local
    beside = run if place is None else place.resolve().parent
    try:
        return apply(Recipe(), [read_toml(beside / RECIPE_FILE)])
    except ArmillaryError:
        return None


def is_end(found: Found, place: Place, recipe: Recipe) -> bool:
    """Whether a run has no step left to take: its own checkpoint has the whole budget."""
    return found.step >= recipe.total_steps and is_own(found, place)


def is_told(found: Found, folder: Path, recipe: Recipe) -> bool:
    """Whether all that this recipe has to tell of its end, scores and samples, is in the log."""
    is_same = found.manifest["recipe_sha256"] == recipe_sha256(recipe)
    if not is_same and _recipe_beside(found, folder) != recipe:  # a newer version has more leaves
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
