"""Cloze: does the model go on with the words that are missing?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from armillary.evaluation.config import EvaluationTask
from armillary.evaluation.files import Item, missing_files, read_items, read_text, text_in
from armillary.evaluation.items import Encoder, Likelihood, Measured, Request, mean, share
from armillary.foundation.component import component
from armillary.foundation.errors import Problem, UserError


@component("cloze")
@dataclass(frozen=True, kw_only=True, slots=True)
class Cloze(EvaluationTask):
    """Texts that break off; right is who goes on, word for word, as the text does.

    Each line of a file is an object: `context` and `target`, or `text`, whose last word is the
    target. Right means that each token of the target is the likeliest one. (LAMBADA: Paperno et
    al. 2016, arXiv 1606.06031; with the last word as target, as there)
    """

    name: str = "cloze"
    """Under which figures are told."""
    files: tuple[str, ...] = ("bundled:endings.jsonl",)
    """Files of JSON lines; bundled:endings.jsonl comes with the package."""
    prefix: str = ""
    """File with a text that stands before each item; empty: none."""
    limit: int = 0
    """Items used, the first ones; 0: all."""

    def prepare(self, encoder: Encoder) -> PreparedCloze:
        """See `EvaluationTask.prepare`."""
        prefix = read_text(self.prefix)
        pairs = [_pair(item) for item in read_items(self.files, self.limit)]
        return PreparedCloze(tuple(encoder.pairs([(prefix + a, b) for a, b in pairs])))

    def problems(self, where: str) -> list[Problem]:
        """See `EvaluationTask.problems`."""
        return [] if self.files else [Problem(f"{where}.files is empty", "files of JSON lines")]

    def missing(self, where: str) -> list[Problem]:
        """See `EvaluationTask.missing`."""
        files = missing_files(self.files, f"{where}.files")
        return [*files, *missing_files([self.prefix], f"{where}.prefix")]


@dataclass(frozen=True, slots=True)
class PreparedCloze:
    """A request for each item."""

    requests: tuple[Request, ...]

    def measure(self, answers: Sequence[Likelihood]) -> Measured:
        """See `Prepared.measure`."""
        nats = mean("nats", [answer.nats for answer in answers])
        hits = [answer.greedy and answer.tokens > 0 for answer in answers]  # of nothing: no hit
        accuracy = share("accuracy", hits)
        return Measured(metrics=(accuracy, nats), items=len(answers), score=nats.value)


def _pair(item: Item) -> tuple[str, str]:
    """Context and target; the space between two words is the target's."""
    where, fields = item
    if "target" in fields:
        context, target = text_in(item, "context"), text_in(item, "target")
        if context and not context[-1].isspace() and target and not target[0].isspace():
            target = " " + target
    else:
        text = text_in(item, "text").rstrip()
        context, space, target = text.rpartition(" ")
        target = space + target
    if not context.strip() or not target.strip():
        raise UserError(Problem(f"{where}: no context or no target", "two words or more"))
    return context.rstrip(), context[len(context.rstrip()) :] + target
