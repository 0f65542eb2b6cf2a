"""From the recipe to where training begins: all that can be refused, and then the folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from armillary.checkpoint.find import Found
from armillary.checkpoint.manifest import step_names
from armillary.checkpoint.places.open import require_reach
from armillary.checkpoint.room import copies_needed, require_room
from armillary.checkpoint.store import CheckpointStore
from armillary.foundation.errors import UserError
from armillary.foundation.progress import Progress
from armillary.parallel.mesh import Mesh
from armillary.recipe.plain import recipe_sha256
from armillary.recipe.recipe import Recipe
from armillary.training import identity
from armillary.training import resume as resuming
from armillary.training.agreed_stop import AgreedStop
from armillary.training.assembly import Assembly, assemble, open_data
from armillary.training.interruptible import Interruptible
from armillary.training.resume import Beginning
from armillary.training.run_folder import describe_run

BYTES_PER_PARAMETER = 12
"""Of a checkpoint: a float32 weight and the optimizer's two float32 moments."""


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
        data = open_data(recipe, interruptible, self._ranks, check)
        store.clean()
        found = self._find(followed, interruptible)
        if found is not None:
            resuming.require_budget(found, recipe, store.place)
        elif self._resume == "auto":
            self._ranks.on_main(lambda: identity.require_nothing_lost(self._folder, store.place))
        self._stop.check()
        with self._progress.task("building the model"):
            assembly = assemble(recipe, self._mesh, data)
        beginning = resuming.begin_anew(assembly)
        if found is not None:
            self._stop.check()
            with self._progress.task(f"loading step {found.step}"):
                beginning = resuming.restore(assembly, store, found, check)
        # From here on there is something to save: the first step sees a request to stop.
        for note in beginning.notes:
            self._warn(0, note, hint="see checkpoint.partial")
        nothing_left = self._settle(assembly, found)
        self._ranks.on_main(lambda: identity.remember(self._folder, run))
        beginning = replace(beginning, run=run)
        return Prepared(assembly=assembly, beginning=beginning, nothing_left=nothing_left)

    def _identify(self) -> str:
        place, sha256 = self._store.place, recipe_sha256(self._recipe)
        return identity.identify(self._folder, place, resume=self._resume, recipe_sha256=sha256)

    def _require_room(self, *, goes_on: bool) -> None:
        there = len(step_names(self._store.place)) if goes_on else 0
        steps = self._recipe.budget.total_steps
        copies = copies_needed(self._recipe.checkpoint, there, steps)
        size = BYTES_PER_PARAMETER * self._recipe.model.parameter_count()
        require_room(self._store.place, size * copies)

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
        words = f"{message}; a longer budget, as --budget.steps, goes on from there"
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
