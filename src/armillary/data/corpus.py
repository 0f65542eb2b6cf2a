"""The corpus slot: what a corpus is, how its documents are named, decoded and read in pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from armillary.foundation.component import Component
from armillary.foundation.errors import ArmillaryError, Problem, UserError

if TYPE_CHECKING:
    from armillary.data.tokenizer import TokenizerConfig

BAD_TEXT_CHOICES = ("error", "replace", "skip")

Span = tuple[int, int]
"""First and one past the last character (or token) of a stretch."""


@dataclass(frozen=True, slots=True)
class Marks:
    """What is special about stretches of a document's text; in order, none overlaps another."""

    template: tuple[Span, ...]
    """Where names of special tokens stand for these tokens; anywhere else they are text."""
    scored: tuple[Span, ...]
    """What is predicted; everything else is only read."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text that is trained on, or held out, as a whole.

    A corpus of text gives `text`; one that is made of tokens gives `tokens` and no text.
    """

    id: str
    """Stable name; whether the document is held out depends on nothing else."""
    text: str
    tokens: NDArray[Any] | None = None
    """[T] token ids, whole numbers; a BOS or EOS of the recipe's is added where it is missing."""
    scored: NDArray[np.bool_] | None = None
    """[T] which of `tokens` are predicted, in corpora with `masks`; None is all of them."""
    group: str = ""
    """Documents of one group are held out together, by the hash of its name; empty is the id."""
    marks: Marks | None = None
    """Stretches of `text`, in corpora with `masks`. The text holds its own BOS and EOS, if any."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to train on; such documents are left out and counted."""
        return not self.text if self.tokens is None else not len(self.tokens)

    def content(self) -> bytes:
        """All that its tokens follow from, besides the tokenizer: its text, as a rule."""
        text = self.text.encode("utf-8")
        if self.tokens is None and self.marks is None:
            return text
        parts = [
            text,
            b"" if self.tokens is None else self.tokens.astype("<i8").tobytes(),
            b"" if self.scored is None else np.packbits(self.scored).tobytes(),
            repr(self.marks).encode(),
        ]
        return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


@dataclass(frozen=True, slots=True)
class Source:
    """A part of a corpus that is read in one go: a file, a range of its bytes, or of its rows."""

    name: str
    """What the ids of its documents begin with."""
    path: str = ""
    start: int = 0
    end: int = -1
    """First and one past the last byte or row; -1 is the end."""
    size: int = 0
    """About how many bytes it holds; work is shared out by it."""
    stamp: str = ""
    """Differs when the content may have changed (size and times of the file)."""
    changed_ns: int = 0
    """When the file last changed, nanoseconds since the epoch; 0 when unknown."""


class CorpusConfig(Component, ABC):
    """Slot `data.corpus`: where documents come from."""

    __slots__ = ()

    @abstractmethod
    def sources(self) -> list[Source]:
        """What there is to read, in the corpus's own fixed order; looks at no content.

        Raises:
            UserError: nothing matches, or the values ask for nothing that is there.
        """

    @abstractmethod
    def read(self, source: Source) -> Iterator[Document | Problem]:
        """The documents of one source, in order; what cannot be read comes as a `Problem`."""

    def holds_tokens(self) -> bool:
        """Whether documents come as tokens, made with a tokenizer that the recipe must name."""
        return False

    def prepared(self, tokenizer: TokenizerConfig) -> CorpusConfig:
        """The corpus as it is read for a tokenizer, where its documents depend on that."""
        return self

    def chat_template(self) -> str:
        """The template that its documents are written by, once it is prepared; empty without."""
        return ""

    def masks(self) -> bool:
        """Whether parts of its documents are only read, not predicted; the store says which."""
        return False

    def problems(self) -> list[Problem]:
        """What is wrong with the values themselves; looks for no file."""
        policy = getattr(self, "on_bad_text", "error")
        if policy in BAD_TEXT_CHOICES:
            return []
        choices = ", ".join(BAD_TEXT_CHOICES)
        fix = "--data.corpus.on-bad-text replace"
        return [Problem(f"data.corpus.on_bad_text = {policy!r}", choices, fix)]

    def source_problems(self) -> list[Problem]:
        """What keeps `sources` from finding anything to read."""
        return problems_of(self.sources)


def problems_of(question: Callable[[], object]) -> list[Problem]:
    """What a call raises in words for people; nothing when it returns."""
    try:
        question()
    except ArmillaryError as error:
        return error.problems
    return []


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One corpus of a mixture and how much of it to use."""

    corpus: CorpusConfig
    """Where its documents come from."""
    weight: float = 1.0
    """Share of the training samples, relative to the other parts' weights (no unit)."""


def corpus_parts(corpus: CorpusConfig) -> tuple[Part, ...]:
    """The parts of a mixture; any other corpus is its own only part.

    Raises:
        UserError: a mixture without parts, inside a mixture, or with a weight that is not positive.
    """
    parts: tuple[Part, ...] | None = getattr(corpus, "parts", None)
    if parts is None:
        return (Part(corpus=corpus),)
    problems = []
    if not parts:
        problems.append(Problem("data.corpus.parts is empty", "one part or more"))
    for index, part in enumerate(parts):
        where = f"data.corpus.parts.{index}"
        if not 0 < part.weight < float("inf"):
            problems.append(Problem(f"{where}.weight = {part.weight}", "a finite number above 0"))
        if getattr(part.corpus, "parts", None) is not None:
            problems.append(
                Problem(f"{where}.corpus is itself a mixture", "list its parts in the outer one")
            )
    if problems:
        raise UserError(problems)
    return parts


# Text ----------------------------------------------------------------------------------------


def decode_text(raw: bytes, where: str, on_bad_text: str, offset: int = 0) -> str | Problem | None:
    """UTF-8 bytes as text; None where the policy skips them.

    Args:
        raw: the bytes.
        where: file (and line) for the message.
        on_bad_text: `error`, `replace` or `skip`.
        offset: where `raw` begins in the file, for the message.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if on_bad_text == "replace":
            return raw.decode("utf-8", "replace")
        if on_bad_text == "skip":
            return None
        return _bad_text(f"{where}: byte {offset + error.start} is not UTF-8 text")


def clean_text(text: str, where: Callable[[], str], on_bad_text: str) -> str | Problem | None:
    """Text that can be written as UTF-8: half a surrogate pair (JSON allows it) cannot."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError as error:
        if on_bad_text == "replace":
            return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        if on_bad_text == "skip":
            return None
        return _bad_text(f"{where()}: character {error.start} is half of a surrogate pair")


def _bad_text(message: str) -> Problem:
    return Problem(
        message,
        "text in UTF-8",
        "convert the file, or --data.corpus.on-bad-text replace (or skip)",
    )
