"""From the recipe to where training begins: all that can be refused, and then the folder."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from armillary.checkpoint.find import Found
from armillary.checkpoint.manifest import step_names
from armillary.checkpoint.places.open import require_reach
from armillary.checkpoint.room import copies_needed, require_room
from armillary.checkpoint.store import CheckpointStore
from armillary.data.store import TokenStore
from armillary.foundation.errors import Problem, RunError, UserError
from armillary.foundation.progress import Progress
from armillary.parallel.compile import forget_compiled
from armillary.parallel.mesh import Mesh
from armillary.recipe.build import build_model
from armillary.recipe.plain import recipe_sha256
from armillary.recipe.recipe import Recipe
from armillary.recipe.stages import spans_of
from armillary.training import identity
from armillary.training import resume as resuming
from armillary.training.agreed_stop import AgreedStop
from armillary.training.assembly import (
    Assembly,
    assemble,
    data_at,
    open_data,
    require_one_state,
)
from armillary.training.interruptible import Interruptible
from armillary.training.resume import Beginning
from armillary.training.run_folder import describe_run

BYTES_PER_PARAMETER = 12
"""Of a checkpoint: a float32 weight and the optimizer's two float32 moments."""

_BYTES_PER_FROZEN = 4
"""The same, of a parameter that is not trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """All that training begins with."""

    assembly: Assembly
    beginning: Beginning
    nothing_left: str = ""
    """Why there is nothing to do, for people; empty: there is."""


class Preparation:
    """Every rank makes one and calls it alike.

    Args:
        resume: see `train`.
        event: takes an event.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        folder: Path,
        resume: str,
        mesh: Mesh,
        stop: AgreedStop,
        store: CheckpointStore,
        progress: Progress,
        event: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._recipe, self._folder, self._resume = recipe, folder, resume
        self._spans, self._arranged = spans_of(recipe), spans_of(recipe)[0].recipe.parallel
        self._stores: tuple[TokenStore, ...] = ()
        self._run: str | None = None
        self._mesh, self._stop, self._ranks = mesh, stop, stop.ranks
        self._store, self._progress, self._event = store, progress, event

    def prepare(self) -> Prepared:
        """Reads the data, builds the model, loads the checkpoint, and makes the folder the run's.

        Raises:
            UserError: the folder, the data or the checkpoint do not fit; nothing has changed.
            Stopped: a stop was asked for before there was anything to save.
        """
        recipe, store, check = self._recipe, self._store, self._stop.request.check
        self._ranks.on_main(lambda: require_reach(store.place))
        run = self._ranks.on_main(self._identify)
        followed = self._ranks.on_main(
            lambda: resuming.followed_before(self._folder, store.place, self._resume, recipe)
        )
        goes_on = self._resume == "auto" or followed is not None
        self._ranks.on_main(lambda: self._require_room(goes_on=goes_on))
        interruptible = Interruptible(self._progress, check)
        self._stores = open_data(recipe, interruptible, self._ranks, check).stores
        require_one_state(recipe)
        store.clean()
        found = self._find(followed, interruptible)
        if found is not None:
            resuming.require_budget(found, recipe, store.place)
        elif self._resume == "auto":
            self._ranks.on_main(lambda: identity.require_nothing_lost(self._folder, store.place))
        prepared = self._stand_at(found)
        # From here on there is something to save: the first step sees a request to stop.
        for note in prepared.beginning.notes:
            self._warn(0, note, hint="see checkpoint.partial")
        for words in prepared.beginning.told:
            self._say(0, words)
        nothing_left = self._settle(prepared.assembly, found)
        self._ranks.on_main(lambda: identity.remember(self._folder, run))
        self._run = run
        beginning = replace(prepared.beginning, run=run)
        return replace(prepared, beginning=beginning, nothing_left=nothing_left)

    def cross(self, step: int) -> Prepared:
        """From the end of a stage to the beginning of the next, as a resume goes there.

        Nothing of the stage before may be held any more; its end is durable.

        Args:
            step: the border.

        Raises:
            RunError: the checkpoint there is gone.
            Stopped: a stop was asked for.
        """
        self._stop.check()
        gc.collect()
        for span in self._spans:
            if span.last == step:
                forget_compiled(span.recipe.compile)
        found = self._store.find("auto", Interruptible(self._progress, self._stop.request.check))
        if found is None or found.step != step:
            raise RunError(
                Problem(
                    f"the checkpoint of step {step}, at the border to the next stage, is gone or"
                    " damaged",
                    fix="the same command, which goes on from the newest that verifies",
                )
            )
        prepared = self._stand_at(found, looked=True)
        return replace(prepared, beginning=replace(prepared.beginning, run=self._run))

    def _stand_at(self, found: Found | None, *, looked: bool = False) -> Prepared:
        """Builds what goes on from a checkpoint, or from nothing, and takes over its state.

        Args:
            looked: whether a look at held-out text, due at its step, was had.
        """
        span, borders = resuming.span_after(
            found, self._recipe, self._store.place, self._ranks, self._stores, looked=looked
        )
        data = data_at(self._recipe, self._stores, borders)
        if span.recipe.parallel != self._arranged:
            self._mesh = Mesh.create(span.recipe.parallel, self._mesh.device)
            self._arranged = span.recipe.parallel
        self._stop.check()
        with self._progress.task("building the model"):
            assembly = assemble(self._recipe, self._mesh, data, span)
        check = self._stop.request.check
        if found is None:
            beginning = resuming.begin(assembly, check)
        else:
            self._stop.check()
            with self._progress.task(f"loading step {found.step}"):
                beginning = resuming.restore(assembly, self._store, found, check)
        return Prepared(assembly=assembly, beginning=beginning)

    def _identify(self) -> str:
        place, sha256 = self._store.place, recipe_sha256(self._recipe)
        return identity.identify(self._folder, place, resume=self._resume, recipe_sha256=sha256)

    def _require_room(self, *, goes_on: bool) -> None:
        there = step_names(self._store.place) if goes_on else {}
        steps, newest = self._recipe.total_steps, max(there, default=0)
        copies = copies_needed(self._recipe.checkpoint, len(there), steps)
        copies += sum(newest < span.last < steps for span in self._spans)  # borders to come
        require_room(self._store.place, _checkpoint_bytes(self._recipe) * copies)

    def _find(self, followed: int | None, progress: Progress) -> Found | None:
        """The checkpoint to begin at; see `resuming.followed_before`."""
        if followed is not None:
            try:
                found = self._store.find("auto", progress)
            except UserError:  # what was saved since is damaged, so the request is followed again
                found = None
            if found is not None and found.step > followed:
                note = f"--resume {self._resume} was followed before, so the run goes on from there"
                redo = f"remove {self._folder / resuming.RESUMED_FILE} to go back once more"
                self._say(found.step, f"{note}; {redo}")
                self._resume = "auto"
                return found
        return self._store.find(self._resume, progress)

    def _settle(self, assembly: Assembly, found: Found | None) -> str:
        """Says where the run begins and makes the folder its own; nothing is refused any more.

        Returns why there is nothing to do; empty if there is.
        """
        step, nothing_left = 0, ""
        if found is not None:
            step = found.step
            if warning := resuming.recipe_warning(found, self._recipe, self._folder):
                self._warn(step, warning, hint="the run goes on with the values of this command")
            self._say(step, found.reasons[-1])
        for remark in assembly.data.training.remarks:
            self._say(step, remark)
        tokenizer = assembly.data.store.tokenizer
        if found is not None and resuming.is_end(found, self._store.place, self._recipe):
            nothing_left = self._finished(found)  # the weights are of the recipe there, which stays
        else:
            self._ranks.on_main(lambda: describe_run(self._folder, self._recipe, tokenizer))
        if self._resume != "auto":
            self._leave_behind(found, step)
        return nothing_left

    def _finished(self, found: Found) -> str:
        """There is no step to take; the end itself is told again unless it is in the log."""
        message = f"{self._folder} has finished already at step {found.step:,}"
        option = resuming.longer(self._recipe, found.step).split()[0]
        words = f"{message}; a longer budget, as {option}, goes on from there"
        told = self._ranks.on_main(lambda: resuming.is_told(found, self._folder, self._recipe))
        if told and self._resume == "auto":
            return words
        self._say(found.step, words)
        return ""

    def _leave_behind(self, found: Found | None, step: int) -> None:
        """Another past was chosen: what came after it must not be resumed by mistake."""
        after = found.step if found and resuming.is_own(found, self._store.place) else -1
        for path in self._store.set_aside_after(after):
            self._say(step, f"an older run's checkpoint is now {path}")
        self._ranks.on_main(
            lambda: resuming.remember_followed(self._folder, self._resume, self._recipe, after)
        )

    def _say(self, step: int, message: str) -> None:
        self._event("message", {"step": step, "message": message})

    def _warn(self, step: int, message: str, *, hint: str) -> None:
        fields = {"step": step, "message": message, "where": "resume", "hint": hint}
        self._event("warning", fields)


def _checkpoint_bytes(recipe: Recipe) -> int:
    """About how large one is; the first to refuse a tuning that does not fit the model."""
    with torch.device("meta"):
        parameters = build_model(recipe).parameters()
    return sum(
        p.numel() * (BYTES_PER_PARAMETER if p.requires_grad else _BYTES_PER_FROZEN)
        for p in parameters
    )
