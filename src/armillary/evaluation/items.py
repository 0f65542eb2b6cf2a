"""Between a task and a model: texts as tokens to be predicted, and how likely they were."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from armillary.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Request:
    """How likely is this, after that?"""

    context: tuple[int, ...]
    """Tokens that are only read; where there is none, the first of what follows is not scored."""
    continuation: tuple[int, ...]
    """Tokens that are scored; of any number."""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The answer to a `Request`."""

    nats: float
    """-log of the probability of the scored tokens together; 0 where there is none."""
    greedy: bool
    """Whether each of them is the likeliest after those before it."""
    tokens: int
    """How many were scored."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a task."""

    name: str
    value: float
    error: float | None = None
    """Standard error over the items; None: it is not known."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a task found."""

    metrics: tuple[Metric, ...]
    items: int
    """Questions, or documents, behind them."""
    score: float
    """One of them as a number of which less is better: checkpoints are ranked by it."""


class Prepared(Protocol):
    """A task with its items read and tokenised."""

    @property
    def requests(self) -> Sequence[Request]:
        """What to ask the model."""

    def measure(self, answers: Sequence[Likelihood]) -> Measured:
        """The figures, from one answer to each request, in their order."""


@dataclass(frozen=True, slots=True)
class Encoder:
    """Text to tokens, begun and ended as the documents of training were."""

    tokenizer: Tokenizer
    bos: bool
    """Whether a text begins with the tokenizer's BOS."""
    eos: bool
    """Whether a whole document ends with its EOS."""

    @property
    def beginning(self) -> tuple[int, ...]:
        """What stands before the first token of a text."""
        bos = self.tokenizer.bos_id if self.bos else None
        return () if bos is None else (bos,)

    def document(self, text: str) -> Request:
        """All of a text: its tokens given those before, its end included as in training."""
        return self.tokens(self.tokenizer.encode(text))

    def tokens(self, ids: Sequence[int]) -> Request:
        """The same of a document that comes as tokens, with a BOS or EOS where it lacks one."""
        ids = tuple(int(each) for each in ids)
        begun = bool(self.beginning) and ids[:1] == self.beginning
        ending = self.tokenizer.eos_id if self.eos else None
        ended = ending is None or ids[-1:] == (ending,)
        return Request(self.beginning, ids[begun:] + (() if ended or ending is None else (ending,)))

    def pairs(self, texts: Sequence[tuple[str, str]]) -> list[Request]:
        """Of each (context, continuation): the second as it is written after the first.

        Both are tokenised as one text. What is scored begins where its tokens and those of the
        context alone part: a token across the border counts as the continuation's.
        """
        contexts = self.tokenizer.encode_batch([context for context, _ in texts])
        wholes = self.tokenizer.encode_batch([context + more for context, more in texts])
        requests = []
        for before, ids in zip(contexts, wholes, strict=True):
            context, whole = before.tolist(), ids.tolist()
            same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(context, whole))  # noqa: B905
            common = sum(1 for _ in same)
            requests.append(Request((*self.beginning, *whole[:common]), tuple(whole[common:])))
        return requests

    def unscored_bytes(self, request: Request) -> int:
        """Bytes of a document's text that no token was scored for: of its first, without a BOS."""
        if request.context or not request.continuation:
            return 0
        return self.tokenizer.byte_count(request.continuation[0])


def share(name: str, hits: Sequence[bool]) -> Metric:
    """The share of hits, with the standard error of a mean of that many draws."""
    count = len(hits)
    hit = sum(hits) / count
    error = math.sqrt(hit * (1 - hit) / (count - 1)) if count > 1 else None
    return Metric(name, hit, error)


def mean(name: str, values: Sequence[float]) -> Metric:
    """The mean, with its standard error; the order of the values is no matter."""
    count = len(values)
    middle = _sum(values) / count
    if count < 2:
        return Metric(name, middle)
    variance = _sum([(value - middle) ** 2 for value in values]) / (count - 1)
    return Metric(name, middle, math.sqrt(variance / count))


def _sum(values: Sequence[float]) -> float:
    """`math.fsum`, which has no answer to a sum of infinities of both signs."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
