"""Multiple choice: which of several endings is the likeliest?"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from armillary.evaluation.config import EvaluationTask
from armillary.evaluation.files import (
    Item,
    missing_files,
    read_items,
    read_text,
    require_text,
    text_in,
)
from armillary.evaluation.items import Encoder, Likelihood, Measured, Request, mean, share
from armillary.foundation.component import component
from armillary.foundation.errors import Problem, UserError

_MOST_CHOICES = 1_000


@component("multiple-choice")
@dataclass(frozen=True, kw_only=True, slots=True)
class MultipleChoice(EvaluationTask):
    """Questions with given answers; the model's is the one that it finds likeliest.

    Each line of a file is an object: `question` (or `context`), `choices`, and `answer`: the place
    of the right one from 0, its text, or its letter. Three ways to compare are told, as longer
    answers are less likely: by probability, by that of a byte, and by that of a token. (Brown et
    al. 2020, arXiv 2005.14165, section 2.4)
    """

    name: str = "multiple-choice"
    """Under which figures are told."""
    files: tuple[str, ...] = ("bundled:choices.jsonl",)
    """Files of JSON lines; bundled:choices.jsonl comes with the package."""
    prefix: str = ""
    """File with a text that stands before each question, such as solved ones; empty: none."""
    delimiter: str = " "
    """Between a question and an answer."""
    limit: int = 0
    """Questions used, the first ones; 0: all."""

    def prepare(self, encoder: Encoder) -> PreparedChoices:
        """See `EvaluationTask.prepare`."""
        prefix = read_text(self.prefix)
        questions = [_question(item) for item in read_items(self.files, self.limit)]
        pairs = [
            (prefix + question.text, self.delimiter + choice)
            for question in questions
            for choice in question.choices
        ]
        return PreparedChoices(tuple(questions), tuple(encoder.pairs(pairs)))

    def problems(self, where: str) -> list[Problem]:
        """See `EvaluationTask.problems`."""
        return [] if self.files else [Problem(f"{where}.files is empty", "files of JSON lines")]

    def missing(self, where: str) -> list[Problem]:
        """See `EvaluationTask.missing`."""
        files = missing_files(self.files, f"{where}.files")
        return [*files, *missing_files([self.prefix], f"{where}.prefix")]


@dataclass(frozen=True, slots=True)
class Question:
    """One item."""

    text: str
    choices: tuple[str, ...]
    answer: int
    """Place of the right one."""


@dataclass(frozen=True, slots=True)
class PreparedChoices:
    """A request for each choice of each question."""

    questions: tuple[Question, ...]
    requests: tuple[Request, ...]

    def measure(self, answers: Sequence[Likelihood]) -> Measured:
        """See `Prepared.measure`. Of equally likely choices the first one counts."""
        hits: dict[str, list[bool]] = {"": [], "_per_byte": [], "_per_token": []}
        right: list[float] = []
        first = 0
        for question in self.questions:
            own = answers[first : first + len(question.choices)]
            first += len(own)
            sizes = {
                "": [1] * len(own),
                "_per_byte": [len(choice.encode("utf-8")) for choice in question.choices],
                "_per_token": [max(1, answer.tokens) for answer in own],
            }
            for suffix, by in sizes.items():
                costs = [answer.nats / size for answer, size in zip(own, by, strict=True)]
                hits[suffix].append(_least(costs) == question.answer)
            right.append(own[question.answer].nats)
        metrics = [share(f"accuracy{suffix}", each) for suffix, each in hits.items()]
        return Measured(
            metrics=(*metrics, mean("nats", right)),
            items=len(self.questions),
            score=1 - metrics[0].value,
        )


def _least(costs: Sequence[float]) -> int:
    """Place of the least; -1, so that nothing is right, where one is no number."""
    if any(map(math.isnan, costs)):
        return -1
    return min(range(len(costs)), key=costs.__getitem__)


def _question(item: Item) -> Question:
    where, fields = item
    text, choices = text_in(item, "question", "context"), fields.get("choices")
    if not isinstance(choices, list) or not 2 <= len(choices) <= _MOST_CHOICES:
        raise UserError(Problem(f"{where}: 'choices' is no list of 2 to {_MOST_CHOICES} texts"))
    texts = tuple(require_text(choice, f"{where}, a choice") for choice in choices)
    if "" in texts:
        raise UserError(Problem(f"{where}: an empty choice", "texts of a character or more"))
    return Question(text, texts, _place(fields.get("answer"), texts, where))


def _place(answer: Any, choices: Sequence[str], where: str) -> int:
    """Which choice is the right one."""
    if type(answer) is int and 0 <= answer < len(choices):
        return answer
    if isinstance(answer, str) and choices.count(answer) == 1:
        return choices.index(answer)
    letters = string.ascii_uppercase[: len(choices)]
    if isinstance(answer, str) and len(answer) == 1 and answer in letters:
        return letters.index(answer)
    allowed = f"0 to {len(choices) - 1}, a letter {letters[0]} to {letters[-1]}, or a choice's text"
    raise UserError(Problem(f"{where}: 'answer' is {str(answer)[:80]!r}", allowed))
