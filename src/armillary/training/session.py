"""The loop: steps, looks at held-out text, checkpoints, until a stage is through or a stop."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from armillary.checkpoint import rng
from armillary.checkpoint.state import gather_state
from armillary.checkpoint.store import STOP_GRACE_SECONDS, CheckpointStore
from armillary.data.dataset import ValidationDataset
from armillary.foundation.progress import Progress
from armillary.foundation.restarts import restart_number
from armillary.parallel import process
from armillary.recipe.plain import recipe_sha256
from armillary.resilience.signals import Stopped
from armillary.telemetry.events import EventLog
from armillary.telemetry.memory import peak_memory_bytes
from armillary.telemetry.profiler import StepProfiler
from armillary.telemetry.timing import StepTimer
from armillary.training.agreed_stop import AgreedStop
from armillary.training.assembly import Assembly
from armillary.training.bad_step import FoundBad, Recovery, Rewound
from armillary.training.company import DealtAnew
from armillary.training.evaluating import Evaluating, is_due
from armillary.training.exporting import Exporting
from armillary.training.feed import StepInput, feed
from armillary.training.replicated import company_of
from armillary.training.resume import Beginning, is_look_due
from armillary.training.speed import Speed
from armillary.training.state import Position
from armillary.training.steps import Steps, Taken
from armillary.training.upkeep import Upkeep
from armillary.training.validation import ValidationResult, validate


class Session:
    """One process's part in a run, from where it stands to the end of the stage.

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
        upkeep: Upkeep,
    ) -> None:
        self.assembly = assembly
        self.stop = stop
        self._log, self._progress, self._store = log, progress, store
        self._upkeep = upkeep
        self._speed = Speed.of(assembly)
        self._timer = StepTimer(assembly.mesh.device)
        self._scores: dict[str, float] = {}
        self._company = company_of(assembly, stop, log)
        self._begin_at(beginning)
        self._recovery = Recovery(
            assembly=assembly,
            folder=folder,
            log=log,
            progress=progress,
            store=store,
            stop=stop,
            save=self.save,
        )
        self._exporting = Exporting(assembly.recipe, folder=folder, store=store, log=log)
        self._profiler = StepProfiler(assembly.recipe.telemetry, folder, log, process.rank())
        self._will_compile = assembly.recipe.compile.enabled
        self._warned_of_peak = False
        self._recipe_sha256 = recipe_sha256(assembly.run)

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
            restart=restart_number(),
            data_fingerprint=self.position.data_fingerprint,
            corpus_fingerprint=self.assembly.data.store.corpus_fingerprint,
            **self._speed.start_fields(),
        )
        for report in self.assembly.model.conversions:
            for line in report.lines():
                self._log.emit("message", self.position.step, message=line)
        if self.assembly.run.stages:
            self.tell_stage()

    def tell_stage(self) -> None:
        """Says which stage of the run goes on here."""
        span, recipe = self.assembly.span, self.assembly.recipe
        self._log.emit(
            "stage",
            self.position.step,
            name=span.name,
            index=span.index,
            first_step=span.first + 1,
            last_step=span.last,
            set=self.assembly.run.stages[span.index].set,
            cursor=self.position.cursor,
            seq_len=recipe.budget.seq_len,
            mesh=self.assembly.mesh.axes,
            data_fingerprint=self.position.data_fingerprint,
            corpus_fingerprint=self.assembly.data.store.corpus_fingerprint,
            flops_per_token=self._speed.flops_per_token,
            flops_per_token_noncausal=self._speed.flops_per_token_noncausal,
        )

    @property
    def position(self) -> Position:
        """Where the run stands: behind the last step whose figures were read."""
        return self._steps.position

    def _begin_at(self, beginning: Beginning) -> None:
        """Goes on from there with the next step."""
        self._beginning = beginning
        self._steps = Steps(
            self.assembly,
            beginning.position,
            timer=self._timer,
            sums=self._company.sums,
            before_update=self._store.wait_until_staged,
            sum_step=self._company.sum_step,
            lag=self._company.most_in_flight,
        )

    def run(self) -> None:
        """Takes every step that is left of the stage; its end is durable on return.

        Raises:
            Stopped: a stop was asked for; the state is saved.
            RunError: the guard ended the run, or the last checkpoint could not be written.
        """
        try:
            while self.position.step < self.assembly.span.last:
                try:
                    self._take_steps()
                except Rewound as rewound:
                    self._begin_at(rewound.beginning)
                except DealtAnew:
                    self._begin_at(self._beginning)
            self._look_if_due()  # at a border, where a stop has cut it short
            self.save()
        except Stopped:
            self._company.close()  # the others shall not wait for what is saved here
            self._exporting.close()
            self._save_where_it_stands()
            raise
        except BaseException:
            self._exporting.close()
            raise
        finally:
            self._company.close()
            self._profiler.close()
        asked = self.stop.request
        self._store.wait(raise_failure=True, stop_asked=lambda: asked.requested)
        self.stop.ranks.on_main(lambda: self._exporting.finish(asked.check))

    def _take_steps(self) -> None:
        steps, span = self._steps, self.assembly.span
        until = span.last
        with (
            feed(self.assembly, self.position, until=until, share=self._company.deal()) as inputs,
            self._upkeep.around_steps(),
        ):
            self._look_if_due()  # as it may have been cut short
            self._timer.restart()
            while steps.begun < until:
                self._company.begin_step(self._staged_position)
                with self._timer.phase("data"):
                    mine = next(inputs)
                with self._said_if_compiling():
                    self._take(mine)
                save, look = self._is_save_due(steps.begun), is_look_due(span, steps.begun)
                self._read(leave=0 if save or look or steps.begun == until else steps.lag)
                self._company.end_step(self._staged_position)
                if look:
                    self._look_if_due()
                if save:
                    with self._timer.phase("checkpoint"):
                        self.save()

    def _staged_position(self) -> Position:
        """For those who may change the weights: where the run stands, once saves have a copy."""
        self._store.wait_until_staged()
        return self._steps.noted()

    def _save_where_it_stands(self) -> None:
        """Before leaving on request."""
        try:
            self._read()
        except Rewound as rewound:
            self._begin_at(rewound.beginning)
        self.save()
        self._store.wait(raise_failure=True, retry_seconds=STOP_GRACE_SECONDS)

    def _said_if_compiling(self) -> AbstractContextManager[object]:
        """Around a step: says why the first one takes so long."""
        if not self._will_compile:
            return nullcontext()
        self._will_compile = False
        return self._progress.task("compiling")

    def _take(self, mine: StepInput) -> None:
        step = self._steps.begun + 1
        self._profiler.before_step(step)
        self._steps.take(mine)
        self._profiler.after_step(step)

    def _read(self, *, leave: int = 0) -> None:
        """Tells what steps have measured, until `leave` of them are still to be read.

        Raises:
            Rewound: the guard has gone back to a checkpoint.
            RunError: the guard ends the run.
        """
        for taken in self._steps.read(leave=leave):
            if taken.result.health.skipped:
                policy = self.assembly.recipe.guard.policy
                policy.react(FoundBad(self._recovery, taken, self.position, self._beginning))
                assert not taken.result.health.frozen, f"{policy} goes on from a step it may not"
            self._report(taken)

    def _report(self, taken: Taken) -> None:
        """The event of a step that counts."""
        result, weight = taken.result, taken.weights[0]
        health, position = result.health, self.position
        seconds = taken.ended.seconds()
        rate = weight / seconds.step
        if (warning := self._speed.warning(rate)) and not self._warned_of_peak:
            self._warned_of_peak = True
            hint = "set --telemetry.peak-flops, or run `armillary doctor` on the idle machine"
            self._log.warn(warning, where="mfu", hint=hint, step=position.step)
        fields: dict[str, Any] = {}
        if health.skipped:
            fields["skipped"] = True
        if result.gradient_norms:
            fields["gradient_norms"] = result.gradient_norms
        if self.assembly.recipe.telemetry.samples:
            positions = range(*taken.mine.samples)
            fields["sample_ids"] = self.assembly.data.training.sample_ids(positions)
        self._log.emit(
            "step",
            position.step,
            loss=health.loss,
            gradient_norm=health.gradient_norm,
            learning_rate=result.learning_rate,
            tokens=weight,
            tokens_total=position.tokens_total,
            samples=taken.mine.samples,
            epoch=max(self.assembly.data.training.epochs(position.cursor)),
            memory_peak_bytes=peak_memory_bytes(self.assembly.mesh.device),
            **seconds.fields(),
            **self._speed.step_fields(rate),
            **result.statistics,
            **fields,
        )
        self._upkeep.step_done(position.step, seconds)
        self._exporting.look()

    def _is_save_due(self, step: int) -> bool:
        """Whether the state after a step is saved, now or once more; all ranks ask together."""
        due = self.assembly.recipe.checkpoint.is_due(step) and self._company.saves
        return due or self._store.retry_due(step)

    def _look_if_due(self) -> None:
        """Looks at held-out text, and asks tasks, at this step, unless that was done."""
        position, recipe = self.position, self.assembly.recipe
        due = is_look_due(self.assembly.span, position.step)
        if due and position.step != position.looked_at:
            self._scores = {}
            if is_due(recipe.validation.every, position.step):
                results = self.validate(self.assembly.data.validation)
                self._scores = {name: result.bits_per_byte for name, result in results.items()}
            if is_due(recipe.evaluation.every, position.step):
                self._scores = self.evaluate() | self._scores
            position.looked_at = position.step

    def evaluate(self) -> dict[str, float]:
        """See `Evaluating.scores`; the time it takes is no step's."""
        evaluating = Evaluating(self._log, self._progress, self.stop)
        scores = evaluating.scores(self.assembly, self.position.step)
        self._timer.restart()
        return scores

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
        """Begins a checkpoint of this moment, unless a whole one is there.

        That of a border stays for good, as other runs may begin there.
        """
        span, step = self.assembly.span, self.position.step
        if step == self._beginning.saved_step:
            return
        final = step == span.total_steps
        optimizers = self.assembly.optimizers.optimizers
        self._store.save(
            step,
            gather_state(self.assembly.model, optimizers) | {"outer": self.assembly.outer.state()},
            self._steps.noted().scalars(),
            rng=rng.capture(),
            manifest={
                "recipe_sha256": self._recipe_sha256,
                "provenance": self._beginning.provenance,
                "run": self._beginning.run,
                "mesh": self.assembly.mesh.axes,
                "data_fingerprint": self.position.data_fingerprint,
                "corpus_fingerprint": self.assembly.data.store.corpus_fingerprint,
                "scores": self._scores if self.position.looked_at == step else {},
            },
            final=final,
            permanent=step == span.last and not span.is_last,
        )
        self._exporting.saved(step, final=final)
