"""Bits per byte: how well a text is predicted, whatever the tokenizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from armillary.data.corpus import CorpusConfig, Document
from armillary.evaluation.config import EvaluationTask
from armillary.evaluation.files import path_of
from armillary.evaluation.items import Encoder, Likelihood, Measured, Metric, Request
from armillary.foundation.component import component
from armillary.foundation.errors import Problem, UserError

_BUNDLED = "bundled:prose.txt"


@component("bits-per-byte")
@dataclass(frozen=True, kw_only=True, slots=True)
class BitsPerByte(EvaluationTask):
    """Documents of any corpus, all of their text.

    The bits that it takes to tell them by the model's predictions, divided by the bytes of their
    text; as in `validation`, each ends with an EOS where those of training do.
    """

    name: str = "bits-per-byte"
    """Under which figures are told."""
    corpus: CorpusConfig | None = None
    """Where the documents are, by any kind of corpus; none: a page that comes with the package."""
    limit: int = 0
    """Documents used, the first ones; 0: all."""

    def prepare(self, encoder: Encoder) -> PreparedText:
        """See `EvaluationTask.prepare`."""
        requests: list[Request] = []
        size = 0
        for document in self._documents():
            request, bytes_ = _encoded(document, encoder)
            if not bytes_:
                continue
            requests.append(request)
            size += bytes_
            if len(requests) == self.limit:
                break
        if not requests:
            raise UserError(Problem(f"{self.name}: no text to score", "a document with text"))
        return PreparedText(tuple(requests), size)

    def problems(self, where: str) -> list[Problem]:
        """See `EvaluationTask.problems`."""
        if self.corpus is None:
            return []
        found = self.corpus.problems()
        if self.corpus.masks():
            message = (
                f"{where}.corpus has parts that are only read, which have no bytes of their own"
            )
            found.append(Problem(message, "a corpus of texts or tokens"))
        return [_placed(problem, where) for problem in found]

    def missing(self, where: str) -> list[Problem]:
        """See `EvaluationTask.missing`."""
        found = self.corpus.source_problems() if self.corpus is not None else []
        return [_placed(problem, where) for problem in found]

    def _documents(self) -> Iterator[Document]:
        if self.corpus is None:
            for page in path_of(_BUNDLED).read_text("utf-8").split("\n\n"):
                yield Document("prose", page.strip())
            return
        for source in self.corpus.sources():
            for document in self.corpus.read(source):
                if isinstance(document, Problem):
                    raise UserError(document)
                yield document


@dataclass(frozen=True, slots=True)
class PreparedText:
    """A request for each document."""

    requests: tuple[Request, ...]
    size: int
    """Bytes of the text that is scored."""

    def measure(self, answers: Sequence[Likelihood]) -> Measured:
        """See `Prepared.measure`."""
        nats = [answer.nats for answer in answers]
        total = math.fsum(nats) if all(map(math.isfinite, nats)) else sum(nats)
        bits = Metric("bits_per_byte", total / math.log(2) / self.size)
        loss = Metric("loss", total / max(1, sum(answer.tokens for answer in answers)))
        return Measured(metrics=(bits, loss), items=len(answers), score=bits.value)


def _encoded(document: Document, encoder: Encoder) -> tuple[Request, int]:
    """All tokens of a document, and the bytes of the text that is scored."""
    if document.tokens is None:
        request, text = encoder.document(document.text), document.text
    else:
        ids = document.tokens.tolist()
        if ids and not 0 <= min(ids) <= max(ids) < encoder.tokenizer.vocab_size:
            message = f"{document.id}: tokens that the tokenizer does not have"
            raise UserError(Problem(message, f"0 to {encoder.tokenizer.vocab_size - 1}"))
        request, text = encoder.tokens(ids), encoder.tokenizer.decode(ids)
    size = len(text.encode("utf-8", "replace"))
    return request, max(0, size - encoder.unscored_bytes(request))


def _placed(problem: Problem, where: str) -> Problem:
    """What a corpus says of itself, where it stands."""
    message, fix = (
        words and words.replace("data.corpus", f"{where}.corpus")
        for words in (problem.message, problem.fix)
    )
    return Problem(message or "", problem.allowed, fix)
