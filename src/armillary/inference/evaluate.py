"""One task, asked of a live model by all its ranks, in a way that fails alone."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from armillary.checkpoint.ranks import Ranks, describe
from armillary.data.tokenizer import Tokenizer
from armillary.evaluation.config import Evaluation, EvaluationTask
from armillary.evaluation.items import Encoder, Measured, Prepared
from armillary.foundation.errors import ArmillaryError, Stopped
from armillary.foundation.progress import Progress
from armillary.inference.scoring import Scorer, ScoringFailed, Sums
from armillary.inference.undisturbed import undisturbed
from armillary.parallel.model import ParallelModel
from armillary.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a task has no figures, in words."""

    words: str


@dataclass(frozen=True, slots=True)
class Answered:
    """What a task found, and how long that took."""

    measured: Measured
    seconds: float


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Every rank makes one and calls it alike."""

    scorer: Scorer
    encoder: Encoder

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        model: ParallelModel,
        tokenizer: Tokenizer,
        *,
        ranks: Ranks,
        sums: Sums,
        progress: Progress,
    ) -> Evaluator:
        """As a recipe has it. It needs less memory than a step: no more is read at once."""
        settings, budget = recipe.evaluation, recipe.budget
        length = min(settings.row_length(budget.seq_len), model.max_seq_len)
        return cls(
            Scorer(
                model=model,
                row_length=length,
                stride=min(settings.stride or length, length),
                rows_at_once=rows_at_once(settings, length, budget.microbatch_sequences),
                vocab_size=tokenizer.vocab_size,
                ranks=ranks,
                sums=sums,
                progress=progress,
            ),
            Encoder(tokenizer, bos=recipe.data.bos, eos=recipe.data.eos),
        )

    def run(self, task: EvaluationTask) -> Answered | Failed:
        """The figures of a task; the same on every rank.

        Items are read and counted on rank 0. What a rank fails at comes back as `Failed`, on all of
        them; what they fail at together, as a peer that is gone, is raised.

        Raises:
            Stopped: `sums` was told to stop.
        """
        began, ranks = time.perf_counter(), self.scorer.ranks
        prepared: list[Prepared] = []

        def prepare() -> bytes:
            prepared.append(task.prepare(self.encoder))
            return pickle.dumps(list(prepared[0].requests))

        packed = ranks.on_main(lambda: _attempted(prepare))
        if isinstance(packed, Failed):
            return packed
        try:
            with undisturbed(self.scorer.model):
                answers = self.scorer.score(pickle.loads(packed), f"evaluating {task.name}")
        except ScoringFailed as error:
            return Failed(str(error))
        measured: Measured | Failed = ranks.on_main(
            lambda: _attempted(lambda: prepared[0].measure(answers))
        )
        if isinstance(measured, Failed):
            return measured
        return Answered(measured, time.perf_counter() - began)


def rows_at_once(settings: Evaluation, length: int, microbatch: int) -> int:
    """Rows that a rank reads in one forward pass: no more than a microbatch of training, if set."""
    rows = max(1, settings.tokens_at_once // length)
    return min(rows, microbatch) if microbatch else rows


def _attempted(work: Callable[[], Any]) -> Any:
    """What it returns, or `Failed`: of code that may be anybody's."""
    try:
        return work()
    except Stopped:
        raise
    except ArmillaryError as error:
        return Failed("; ".join(problem.message for problem in error.problems))
    except Exception as error:
        return Failed(describe(error))
