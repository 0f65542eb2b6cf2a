"""The loop: steps, looks at held-out text, checkpoints, until the budget is spent or a stop."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from armillary.checkpoint import rng
from armillary.checkpoint.state import gather_state
from armillary.checkpoint.store import CheckpointStore
from armillary.data.dataset import ValidationDataset
from armillary.foundation.errors import Problem, RunError
from armillary.foundation.progress import Progress
from armillary.parallel import process
from armillary.recipe.plain import recipe_sha256
from armillary.resilience.signals import Stopped
from armillary.telemetry.events import EventLog
from armillary.telemetry.memory import peak_memory_bytes
from armillary.telemetry.profiler import StepProfiler
from armillary.telemetry.timing import StepTimer
from armillary.training.agreed_stop import AgreedStop
from armillary.training.assembly import Assembly
from armillary.training.feed import StepInput, feed
from armillary.training.resume import Beginning
from armillary.training.speed import Speed
from armillary.training.step import StepResult, optimizer_step
from armillary.training.validation import ValidationResult, validate


class Session:
    """One process's part in a run, from where it stands to its end.

    Every rank makes one and calls it alike; what is written and shown is rank 0's.
    """

    def __init__(
        self,
        assembly: Assembly,
        beginning: Beginning,
        *,
        folder: Path,
        log: EventLog,
        progress: Progress,
        store: CheckpointStore,
        stop: AgreedStop,
    ) -> None:
        self.assembly = assembly
        self.position = beginning.position
        self.stop = stop
        self._beginning = beginning
        self._log, self._progress, self._store = log, progress, store
        self._speed = Speed.of(assembly)
        self._timer = StepTimer(assembly.mesh.device)
        self._profiler = StepProfiler(assembly.recipe.telemetry, folder, log, process.rank())
        self._will_compile = assembly.recipe.compile.enabled
        self._warned_of_peak = False

    def start(self, *, name: str) -> None:
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
            resumed_from=self._beginning.resumed_from,
            total_steps=self.assembly.total_steps,
            checkpoint_every=recipe.checkpoint.every,
            data_fingerprint=self.position.data_fingerprint,
            corpus_fingerprint=self.assembly.data.store.corpus_fingerprint,
            **self._speed.start_fields(),
        )
        for report in self.assembly.model.conversions:
            for line in report.lines():
                self._log.emit("message", self.position.step, message=line)

    def run(self) -> None:
        """Takes every step that is left.

        Raises:
            Stopped: a stop was asked for; the state is saved.
            RunError: the loss is not finite, or the last checkpoint could not be written.
        """
        steps = self.assembly.total_steps - self.position.step
        try:
            with feed(self.assembly, cursor=self.position.cursor, steps=steps) as inputs:
                self._look_if_due()  # a stop may have cut it short
                self._timer.restart()
                while self.position.step < self.assembly.total_steps:
                    with self._timer.phase("data"):
                        mine = next(inputs)
                    with self._said_if_compiling():
                        self._step(mine)
                    self._look_if_due()
                    if _is_due(self.position.step, self.assembly.recipe.checkpoint.every):
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

    def _said_if_compiling(self) -> AbstractContextManager[object]:
        """Around a step: says why the first one takes so long."""
        if not self._will_compile:
            return nullcontext()
        self._will_compile = False
        return self._progress.task("compiling")

    def _step(self, mine: StepInput) -> None:
        step = self.position.step + 1
        weights = self.stop.sums(mine.weights)
        weight = weights[0]
        if weight == 0:
            first, last = mine.samples
            raise RunError(Problem(f"step {step}, samples [{first}, {last}): no token to learn"))
        self._profiler.before_step(step)
        result = optimizer_step(
            self.assembly,
            mine.microbatches,
            weights=weights,
            step=step,
            samples=mine.samples,
            timer=self._timer,
        )
        self._profiler.after_step(step)
        self.position.step = step
        self.position.tokens_total += weight
        self.position.cursor = mine.samples[1]
        self._report(result, weight, mine.samples)

    def _report(self, result: StepResult, weight: int, samples: tuple[int, int]) -> None:
        seconds = self._timer.finish()
        rate = weight / seconds.step
        if (warning := self._speed.warning(rate)) and not self._warned_of_peak:
            self._warned_of_peak = True
            hint = "set --telemetry.peak-flops, or run `armillary doctor` on the idle machine"
            self._log.warn(warning, where="mfu", hint=hint, step=self.position.step)
        fields: dict[str, Any] = {}
        if result.gradient_norms:
            fields["gradient_norms"] = result.gradient_norms
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
            **result.statistics,
            **fields,
        )

    def _look_if_due(self) -> None:
        """Looks at held-out text at this step, unless that was done; the last step has its own."""
        position, every = self.position, self.assembly.recipe.validation.every
        if position.step in (position.looked_at, self.assembly.total_steps):
            return
        if _is_due(position.step, every):
            self.validate(self.assembly.data.validation)
            position.looked_at = position.step

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
                check=self.stop.check,
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

    def save(self) -> None:
        """Begins a checkpoint of this moment, unless a whole one is there."""
        self._store.wait()  # only now is it known whether the one before became whole
        if self.position.step in (self._beginning.saved_step, self._store.durable_step):
            return
        optimizers = self.assembly.optimizers.optimizers
        self._store.save(
            self.position.step,
            gather_state(self.assembly.model, optimizers),
            self.position.scalars(),
            rng=rng.capture(),
            manifest={
                "recipe_sha256": recipe_sha256(self.assembly.recipe),
                "provenance": self._beginning.provenance,
                "mesh": self.assembly.mesh.axes,
                "data_fingerprint": self.position.data_fingerprint,
                "corpus_fingerprint": self.assembly.data.store.corpus_fingerprint,
            },
        )


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
