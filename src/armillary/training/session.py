"""The loop: steps, looks at held-out text, checkpoints, until the budget is spent or a stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from armillary.checkpoint import rng
from armillary.checkpoint.find import Found
from armillary.checkpoint.state import gather_state, restore_training
from armillary.checkpoint.store import CheckpointStore
from armillary.data.dataset import ValidationDataset
from armillary.foundation.errors import Problem, RunError
from armillary.foundation.progress import Progress
from armillary.parallel import process
from armillary.recipe.plain import recipe_sha256
from armillary.resilience.signals import Stopped, StopRequest
from armillary.telemetry.events import EventLog
from armillary.telemetry.memory import peak_memory_bytes
from armillary.telemetry.profiler import StepProfiler
from armillary.telemetry.timing import StepTimer
from armillary.training.agreement import sum_and_any
from armillary.training.assembly import Assembly
from armillary.training.feed import StepInput, feed
from armillary.training.speed import Speed
from armillary.training.state import Position
from armillary.training.step import StepResult, optimizer_step
from armillary.training.validation import ValidationResult, validate


class Session:
    """One process's part in a run, from where it stands to its end.

    Every rank makes one and calls it alike; what is written and shown is rank 0's.
    """

    def __init__(
        self,
        assembly: Assembly,
        *,
        folder: Path,
        log: EventLog,
        progress: Progress,
        store: CheckpointStore,
        stop: StopRequest,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.assembly = assembly
        self.position = Position(data_fingerprint=assembly.data.training.fingerprint)
        self._log, self._progress, self._store, self._stop = log, progress, store, stop
        self._on_step = on_step
        self._speed = Speed.of(assembly)
        self._timer = StepTimer(assembly.mesh.device)
        self._profiler = StepProfiler(assembly.recipe.telemetry, folder, log, process.rank())
        self._provenance: dict[str, Any] = {"from": "scratch"}
        self._saved_step: int | None = None
        self._warned_of_peak = False

    def restore(self, found: Found, *, is_own: bool) -> None:
        """Goes to where a checkpoint stands: weights, optimizers, position, random states.

        Args:
            is_own: Whether it is of this run, and not of another that this one continues.

        Raises:
            UserError: the checkpoint is of another model or of other data.
        """
        scalars, states = restore_training(
            self._store, found, self.assembly.model, self.assembly.optimizers.optimizers
        )
        self.position = Position.from_scalars(
            scalars, data_fingerprint=self.position.data_fingerprint, path=str(found.path)
        )
        if states is not None:
            rng.restore(states)
        origin = found.manifest.get("provenance", self._provenance)
        self._provenance = origin if is_own else {"from": str(found.path), "origin": origin}
        self._saved_step = found.step if is_own else None

    def start(self, *, name: str, resumed_from: int | None) -> None:
        """Says what is about to run."""
        recipe, mesh = self.assembly.recipe, self.assembly.mesh
        self._log.emit(
            "start",
            self.position.step,
            recipe=name,
            world_size=process.world_size(),
            mesh=mesh.axes,
            parameters=recipe.model.parameter_count(),
            seed=recipe.seed,
            resumed_from=resumed_from,
            total_steps=self.assembly.total_steps,
            checkpoint_every=recipe.checkpoint.every,
            data_fingerprint=self.position.data_fingerprint,
            corpus_fingerprint=self.assembly.data.store.corpus_fingerprint,
            **self._speed.start_fields(),
        )

    def run(self) -> None:
        """Takes every step that is left.

        Raises:
            Stopped: a stop was asked for; the state is saved.
            RunError: the loss is not finite, or the last checkpoint could not be written.
        """
        steps = self.assembly.total_steps - self.position.step
        recipe = self.assembly.recipe
        try:
            with feed(self.assembly, cursor=self.position.cursor, steps=steps) as inputs:
                self._timer.restart()
                while self.position.step < self.assembly.total_steps:
                    with self._timer.phase("data"):
                        mine = next(inputs)
                    self._step(mine, data_wait=inputs.wait_seconds)
                    step = self.position.step
                    if _is_due(step, recipe.validation.every) and step < self.assembly.total_steps:
                        self.validate(self.assembly.data.validation)
                    if _is_due(step, recipe.checkpoint.every):
                        with self._timer.phase("checkpoint"):
                            self.save()
            self.save()
        except Stopped:
            self.save()
            self._store.wait(raise_failure=True)
            raise
        finally:
            self._profiler.close()
        self._store.wait(raise_failure=True)

    def _step(self, mine: StepInput, *, data_wait: float) -> None:
        step = self.position.step + 1
        weight, stop = sum_and_any(mine.weight, self._stop.requested)
        if stop:
            raise Stopped(self._stop.signal_name or "another rank")
        if weight == 0:
            first, last = mine.samples
            raise RunError(Problem(f"step {step}, samples [{first}, {last}): no token to learn"))
        self._profiler.before_step(step)
        result = optimizer_step(
            self.assembly,
            mine.microbatches,
            weight=weight,
            step=step,
            samples=mine.samples,
            timer=self._timer,
        )
        self._profiler.after_step(step)
        self.position.step = step
        self.position.tokens_total += weight
        self.position.cursor = mine.samples[1]
        self._on_step(step)
        self._report(result, weight, mine.samples)

    def _report(self, result: StepResult, weight: int, samples: tuple[int, int]) -> None:
        seconds = self._timer.finish()
        rate = weight / seconds.step
        if (warning := self._speed.warning(rate)) and not self._warned_of_peak:
            self._warned_of_peak = True
            hint = "set --telemetry.peak-flops, or run `armillary doctor` on the idle machine"
            self._log.warn(warning, where="mfu", hint=hint, step=self.position.step)
        fields: dict[str, Any] = {}
        if self.assembly.recipe.telemetry.samples:
            positions = range(*samples)
            fields["sample_ids"] = self.assembly.data.training.sample_ids(positions)
        self._log.emit(
            "step",
            self.position.step,
            loss=result.loss,
            gradient_norm=result.gradient_norm,
            learning_rate=result.learning_rate,
            tokens=weight,
            tokens_total=self.position.tokens_total,
            samples=samples,
            epoch=max(self.assembly.data.training.epochs(self.position.cursor)),
            memory_peak_bytes=peak_memory_bytes(self.assembly.mesh.device),
            **seconds.fields(),
            **self._speed.step_fields(rate),
            **fields,
        )

    def validate(
        self, datasets: dict[str, ValidationDataset], prefix: str = ""
    ) -> dict[str, ValidationResult]:
        """Scores held-out text; the time it takes is no step's.

        Raises:
            Stopped: a stop was asked for, and all ranks agree to leave.
        """
        results: dict[str, ValidationResult] = {}
        for name, dataset in datasets.items():
            began = time.perf_counter()
            results[name] = result = validate(
                self.assembly.model,
                self.assembly.task,
                dataset,
                mesh=self.assembly.mesh,
                rows_at_once=self.assembly.shape.microbatch,
                progress=self._progress,
                check=self.check,
            )
            self._log.emit(
                "validation",
                self.position.step,
                name=prefix + name,
                loss=result.loss,
                bits_per_byte=result.bits_per_byte,
                tokens=result.tokens,
                bytes=dataset.n_bytes,
                seconds=time.perf_counter() - began,
            )
        self._timer.restart()
        return results

    def check(self) -> None:
        """A point where a long phase can end; all ranks decide together.

        Raises:
            Stopped: some rank was asked to stop.
        """
        if process.any_rank(self._stop.requested):
            raise Stopped(self._stop.signal_name or "another rank")

    def save(self) -> None:
        """Begins a checkpoint of this moment, unless there is one."""
        if self._saved_step == self.position.step:
            return
        self._saved_step = self.position.step
        optimizers = self.assembly.optimizers.optimizers
        self._store.save(
            self.position.step,
            gather_state(self.assembly.model, optimizers),
            self.position.scalars(),
            rng=rng.capture(),
            manifest={
                "recipe_sha256": recipe_sha256(self.assembly.recipe),
                "provenance": self._provenance,
                "mesh": self.assembly.mesh.axes,
                "data_fingerprint": self.position.data_fingerprint,
                "corpus_fingerprint": self.assembly.data.store.corpus_fingerprint,
            },
        )


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
