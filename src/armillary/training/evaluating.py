"""Evaluation in the midst of a run: on the live weights, and in a way that never ends it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from armillary.evaluation.config import EvaluationTask
from armillary.foundation.progress import Progress
from armillary.inference.evaluate import Answered, Evaluator, Failed
from armillary.telemetry.events import EventLog
from armillary.training.agreed_stop import AgreedStop
from armillary.training.assembly import Assembly

_HINT = "training goes on; `armillary eval RUN` asks again, from a checkpoint"


@dataclass(frozen=True, slots=True)
class Evaluating:
    """Every rank makes one and calls it alike; rank 0 tells."""

    log: EventLog
    progress: Progress
    stop: AgreedStop

    def scores(self, assembly: Assembly, step: int) -> dict[str, float]:
        """Asks every task of the recipe, and tells; by the task's name, the less the better.

        A task that fails, on whichever rank, is a warning, and has no score.

        Raises:
            Stopped: a stop was asked for, and all ranks agree to leave.
        """
        return {
            task.name: answer.measured.score
            for task, answer in self._answers(assembly, step)
            if isinstance(answer, Answered)
        }

    def _answers(
        self, assembly: Assembly, step: int
    ) -> Iterator[tuple[EvaluationTask, Answered | Failed]]:
        if not assembly.recipe.evaluation.tasks:
            return
        evaluator = Evaluator.of(
            assembly.recipe,
            assembly.model,
            assembly.data.store.tokenizer,
            ranks=self.stop.ranks,
            sums=self.stop.sums,
            progress=self.progress,
        )
        for task in assembly.recipe.evaluation.tasks:
            answer = evaluator.run(task)
            self._tell(task, answer, step)
            yield task, answer

    def _tell(self, task: EvaluationTask, answer: Answered | Failed, step: int) -> None:
        if isinstance(answer, Failed):
            message = f"evaluation {task.name} failed: {answer.words}"
            self.log.warn(message, where="evaluation", hint=_HINT, step=step)
            return
        for metric in answer.measured.metrics:
            self.log.emit(
                "evaluation",
                step,
                task=task.name,
                metric=metric.name,
                value=metric.value,
                error=metric.error,
                items=answer.measured.items,
                seconds=answer.seconds,
            )


def is_due(every: int, step: int) -> bool:
    """Whether a look every so many steps falls on this one; for 0 none does."""
    return every > 0 and step % every == 0
