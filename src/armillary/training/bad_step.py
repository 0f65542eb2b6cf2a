"""What can be done about a step that would have poisoned the run; see `resilience.guard_config`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from armillary.checkpoint.ranks import Failure
from armillary.checkpoint.store import CheckpointStore
from armillary.foundation.errors import Problem, RunError, UserError
from armillary.foundation.progress import Progress
from armillary.foundation.tell import seen_by_every_rank
from armillary.recipe.plain import recipe_sha256
from armillary.resilience.guard import NOT_FINITE, Health, gradients_at_fault
from armillary.resilience.guard_dump import (
    Replay,
    clear_dump,
    dump_folder,
    write_replay,
    write_rows,
)
from armillary.telemetry.events import EventLog
from armillary.training.agreed_stop import AgreedStop
from armillary.training.assembly import Assembly
from armillary.training.resume import Beginning, restore, resumed_path
from armillary.training.state import Position
from armillary.training.steps import Taken

_NAMES_SHOWN = 6


class Rewound(Exception):
    """The run stands at a checkpoint again, and goes on from there."""

    def __init__(self, beginning: Beginning) -> None:
        super().__init__()
        self.beginning = beginning


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """The parts of a run that a bad step needs."""

    assembly: Assembly
    folder: Path
    log: EventLog
    progress: Progress
    store: CheckpointStore
    stop: AgreedStop
    save: Callable[[], None]
    """Begins a checkpoint of where the run stands."""


class FoundBad:
    """A bad step of this run; a `resilience.guard_config.BadStep`.

    Args:
        parts: of the run.
        taken: the step.
        position: of the run behind the last step that counts.
        beginning: from where the run was begun in this process.
    """

    def __init__(
        self, parts: Recovery, taken: Taken, position: Position, beginning: Beginning
    ) -> None:
        self._parts, self._taken = parts, taken
        self._position, self._beginning = position, beginning
        self._health = taken.result.health
        self._at_fault: list[str] = []

    @property
    def in_a_row(self) -> int:
        """See `BadStep.in_a_row`."""
        return self._health.in_a_row

    @property
    def rewinds(self) -> int:
        """See `BadStep.rewinds`."""
        return self._position.rewinds

    def stop(self, why: str = "") -> NoReturn:
        """See `BadStep.stop`.

        Raises:
            RunError: always, on every rank.
        """
        assert self._health.frozen, "steps after it may have counted: see GuardPolicy.tolerated"
        before = self._position.step
        unsaved = self._save() if before else []
        self._dump()
        saved = ", which is saved" if before and not unsaved else ""
        problem = Problem(
            f"{self._what()}; weights and optimizer state are those of step {before}{saved}"
            + (f"; {why}" if why else ""),
            "finite values" if self._health.kind == NOT_FINITE else "values below their limits",
            f"armillary replay {self._parts.folder}, which repeats the step; then a lower"
            " --optimizer.lr, a longer warm-up, a smaller --max-gradient-norm, or --guard.policy"
            " skip",
        )
        with seen_by_every_rank():
            raise RunError([problem, *self._gradients(), *unsaved])

    def skip(self) -> None:
        """See `BadStep.skip`."""
        self._dump()
        self._warn(f"{self._what()}: its update is left out")

    def rewind(self, *, steps_before: int) -> NoReturn:
        """See `BadStep.rewind`.

        Raises:
            Rewound: the run stands at the checkpoint.
            RunError: there is none; the state before the step is saved.
        """
        assert self._health.frozen, "steps after it may have counted: see GuardPolicy.tolerated"
        parts, position = self._parts, self._position
        self._dump()
        try:
            found = parts.store.find("auto", parts.progress)
        except UserError as error:
            self.stop(f"no checkpoint to go back to: {error.problems[0].message}")
        if found is None or found.step > position.step:
            self.stop("there is no checkpoint yet to go back to")
        if found.step < parts.assembly.span.first:
            self.stop(f"the newest checkpoint, of step {found.step}, is of an earlier stage")
        for path in parts.store.set_aside_after(found.step):
            message = f"a damaged checkpoint is now {path}"
            parts.log.emit("message", position.step, message=message)
        with parts.progress.task(f"going back to step {found.step}"):
            beginning = restore(parts.assembly, parts.store, found)
        at = beginning.position
        at.jumped, at.rewinds = position.jumped, position.rewinds + 1
        at.jump(self._first_sample(at, steps_before), self._taken.mine.samples[1])
        parts.log.emit(
            "rewind",
            position.step,
            message=f"{self._what()}: back to step {found.step}, without these samples",
            to_step=found.step,
            samples=at.jumped[-1],
            rewinds=at.rewinds,
        )
        raise Rewound(replace(beginning, position=at, run=self._beginning.run))

    def _first_sample(self, at: Position, steps_before: int) -> int:
        """Of the step so many before the bad one, or else of the first after `at`."""
        sequences = self._parts.assembly.shape.sequences
        for _ in range(at.step, self._taken.step - 1 - steps_before):
            at = at.after(at.samples(sequences))
        return at.samples(sequences)[0]

    def _save(self) -> list[Problem]:
        """Saves the state before the step; what kept it from being saved."""
        self._parts.save()
        asked = self._parts.stop.request
        try:
            self._parts.store.wait(raise_failure=True, stop_asked=lambda: asked.requested)
        except RunError as error:
            return error.problems
        return []

    def _what(self) -> str:
        first, last = self._taken.mine.samples
        return f"{described(self._health)} at step {self._taken.step}, samples [{first}, {last})"

    def _gradients(self) -> list[Problem]:
        if not self._at_fault:
            return []
        more = len(self._at_fault) - _NAMES_SHOWN
        rest = f" and {more} more" if more > 0 else ""
        names = ", ".join(self._at_fault[:_NAMES_SHOWN])
        return [Problem(f"gradients not finite: {names}{rest}")]

    def _warn(self, message: str) -> None:
        run, step = self._parts.folder, self._taken.step
        hint = f"armillary replay {run} --step {step} repeats it"
        self._parts.log.warn(message, where="guard", hint=hint, step=self._position.step)

    def _dump(self) -> None:
        """Writes what it takes to repeat the step; trouble here is no reason to end differently."""
        parts, taken, health = self._parts, self._taken, self._health
        own = taken.result.gradients_at_fault
        if own is None and health.frozen:
            own = self._gradients_again()
        folder = dump_folder(parts.folder, taken.step)
        model, ranks = parts.assembly.model, parts.stop.ranks

        def write() -> list[str] | None:
            if model.counts_rows:
                write_rows(folder, ranks.rank, taken.mine.microbatches, taken.mine.rows)
            return own

        try:
            ranks.on_main(lambda: clear_dump(folder))
            of_ranks = ranks.together(write)
            replay = self._replay(of_ranks)
            ranks.on_main(lambda: write_replay(parts.folder, replay))
        except Failure as failure:
            message = f"step {taken.step} could not be dumped for a replay: {failure}"
            hint = f"check {folder} and its disk"
            parts.log.warn(message, where="guard", hint=hint, step=self._position.step)
            return
        # The same words on every rank: those of the first that has any.
        self._at_fault = next((names for names in of_ranks if names), [])

    def _gradients_again(self) -> list[str]:
        """They were dropped before the step was read; the weights are still those of the step."""
        assembly, weights = self._parts.assembly, self._taken.weights
        assembly.model.forward_backward(
            assembly.task.within(weights), self._taken.mine.microbatches
        )
        names = gradients_at_fault((n, p.grad) for n, p in assembly.model.named_parameters())
        assembly.optimizers.zero_grad()
        assembly.model.take_counts()  # of no step
        return names

    def _replay(self, of_ranks: list[list[str] | None]) -> Replay:
        parts, taken, at = self._parts, self._taken, self._beginning
        gradients = {str(rank): names for rank, names in enumerate(of_ranks) if names is not None}
        return Replay(
            step=taken.step,
            samples=taken.mine.samples,
            kind="not finite" if self._health.kind == NOT_FINITE else "spike",
            loss=self._health.loss,
            gradient_norm=self._health.gradient_norm,
            sample_ids=list(parts.assembly.data.training.sample_ids(range(*taken.mine.samples))),
            gradients=gradients or None,
            checkpoint_step=max(parts.store.durable_step or 0, at.saved_step or 0),
            begun_from=resumed_path(at.provenance),
            jumped=self._position.jumped,
            recipe_sha256=recipe_sha256(parts.assembly.run),
            world_size=parts.stop.ranks.size,
        )


def described(health: Health) -> str:
    """What is wrong with a step, in words."""
    loss, norm = health.loss, health.gradient_norm
    values = zip(("loss", "gradient norm"), (loss, norm), health.limits, strict=True)
    if health.kind == NOT_FINITE:
        bad = [f"{name} {value}" for name, value, _ in values if not math.isfinite(value)]
    else:
        bad = [f"{name} {value:.4g} (limit {limit:.4g})" for name, value, limit in values
               if value > limit]  # fmt: skip
    return " and ".join(bad) or f"loss {loss} and gradient norm {norm}, bad on another rank,"
