"""Ranks that compute together what rank 0 is asked for by lm-eval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from armillary.evaluation.items import Likelihood, Request
from armillary.foundation.errors import UserError
from armillary.foundation.progress import Progress
from armillary.inference.evaluate import Evaluator
from armillary.inference.generate import generate
from armillary.inference.scoring import ScoringFailed
from armillary.inference.served import Served
from armillary.inference.undisturbed import undisturbed


@dataclass(frozen=True, slots=True)
class Score:
    """What ranks are told to compute: likelihoods."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Write:
    """What ranks are told to compute: continuations of prompts, each ended by any of some texts."""

    prompts: tuple[tuple[int, ...], ...]
    until: tuple[str, ...]
    most: int
    temperature: float
    top_k: int
    top_p: float


_ALIKE = (ScoringFailed, UserError)
"""What is raised on every rank or on none; after it none waits for what is told."""


class Company:
    """All ranks, of which rank 0 says what they compute together."""

    def __init__(self, trained: Served, progress: Progress) -> None:
        self.trained = trained
        evaluator = Evaluator.of(
            trained.recipe,
            trained.model,
            trained.tokenizer,
            ranks=trained.ranks,
            sums=trained.sums,
            progress=progress,
        )
        self.scorer, self.encoder = evaluator.scorer, evaluator.encoder
        self._broken = False

    def lead(self, work: Callable[[], None]) -> None:
        """On rank 0: does the work, which calls `score` and `write`; then lets the others go."""
        try:
            work()
        finally:
            if not self._broken:
                self._told(None)

    def follow(self) -> None:
        """On the other ranks: computes along until let go."""
        while (told := self._told(None)) is not None:
            try:
                self._compute(told)
            except _ALIKE:  # rank 0 tells why
                return

    def score(self, requests: Sequence[Request]) -> list[Likelihood]:
        """On rank 0: the answers of all ranks together."""
        found: list[Likelihood] = self._together(Score(tuple(requests)))
        return found

    def write(self, told: Write) -> list[list[int]]:
        """On rank 0: the tokens that follow each prompt."""
        rows: list[list[int]] = self._together(told)
        return rows

    def _told(self, own: Score | Write | None) -> Score | Write | None:
        """What rank 0 says; what the others would say is not asked."""
        return self.trained.ranks.on_main(lambda: own)

    def _together(self, told: Score | Write) -> Any:
        self._told(told)
        try:
            return self._compute(told)
        except _ALIKE:
            self._broken = True
            raise

    def _compute(self, told: Score | Write) -> Any:
        if isinstance(told, Score):
            with undisturbed(self.trained.model):
                return self.scorer.score(told.requests, "evaluating")
        tokenizer = self.trained.tokenizer

        def ended(tokens: Sequence[int]) -> bool:
            text = tokenizer.decode(tokens)
            return any(stop in text for stop in told.until)

        return generate(
            self.trained.model,
            told.prompts,
            max_new_tokens=told.most,
            temperature=told.temperature,
            top_k=told.top_k,
            top_p=told.top_p,
            eos_id=tokenizer.eos_id,
            vocab_size=tokenizer.vocab_size,
            ended=ended if told.until else None,
        )
