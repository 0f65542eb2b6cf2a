"""What a build reads: the parts of a corpus, cut into pieces, and what a store is made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from armillary.data.cache import stamp_of
from armillary.data.config import Data
from armillary.data.corpus import CorpusConfig, Part, Source, corpus_parts
from armillary.data.pieces import cut
from armillary.data.token_store import FORMAT
from armillary.data.tokenizer import TokenizerConfig
from armillary.foundation.component import name_of
from armillary.foundation.errors import Problem, UserError


@dataclass(frozen=True)
class Reading:
    """One part of the corpus, cut into pieces."""

    name: str
    """Of the corpus component."""
    corpus: CorpusConfig
    """As it is read for the tokenizer."""
    sources: list[Source]
    pieces: list[tuple[int, int]]
    stamp: str

    @classmethod
    def of(cls, part: Part, tokenizer: TokenizerConfig) -> Reading:
        """Lists and cuts the sources of a part."""
        if found := part.corpus.problems():
            raise UserError(found)
        corpus = part.corpus.prepared(tokenizer)
        sources = corpus.sources()
        stamp = stamp_of(repr(corpus), sources)
        return cls(name_of(type(part.corpus)), corpus, sources, cut(sources), stamp)

    def piece(self, index: int) -> list[Source]:
        """The sources of one piece."""
        first, last = self.pieces[index]
        return self.sources[first:last]

    def size(self, index: int) -> int:
        """About how many bytes one piece holds."""
        return sum(source.size for source in self.piece(index))


def readings_of(data: Data) -> list[Reading]:
    """The parts of a corpus, as they are read for the recipe's tokenizer.

    Raises:
        UserError: there is nothing to read, or parts that do not go together.
    """
    readings, problems = [], []
    for part in corpus_parts(data.corpus):
        try:
            readings.append(Reading.of(part, data.tokenizer))
        except UserError as error:
            problems += error.problems
    if len({reading.corpus.chat_template() for reading in readings} - {""}) > 1:
        problems.append(
            Problem("data.corpus.parts have different chat templates", "one for all of them")
        )
    if problems:
        raise UserError(problems)
    return readings


def chat_template_of(readings: Sequence[Reading]) -> str:
    """The template of the conversations among the parts; empty without any."""
    return max((reading.corpus.chat_template() for reading in readings), default="")


def made_from(data: Data, readings: Sequence[Reading], fingerprints: list[str]) -> dict[str, Any]:
    """What decides the bytes of a store; what only some corpora have is there for these only."""
    masks = [reading.corpus.masks() for reading in readings]
    template = chat_template_of(readings)
    return {
        "format": FORMAT,
        "corpora": fingerprints,
        "tokenizer": data.tokenizer.identity(),
        "validation_fraction": data.validation_fraction,
        "bos": data.bos,
        "eos": data.eos,
        **({"masks": masks} if any(masks) else {}),
        **({"chat_template": template} if template else {}),
    }
