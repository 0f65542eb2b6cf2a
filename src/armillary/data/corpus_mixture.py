"""A corpus of several corpora, used in given proportions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from armillary.data.corpus import (
    CorpusConfig,
    Document,
    Part,
    Source,
    corpus_parts,
    problems_of,
)
from armillary.foundation.component import component
from armillary.foundation.errors import Problem


@component("mixture")
@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture(CorpusConfig):
    """Several corpora: tokenised apart, drawn from by weight. Weights change no file on disk."""

    parts: tuple[Part, ...] = ()
    """The corpora and their weights."""

    def sources(self) -> list[Source]:
        """All parts' sources, each named `part index/name`."""
        return [
            dataclasses.replace(source, name=f"{index}/{source.name}")
            for index, part in enumerate(corpus_parts(self))
            for source in part.corpus.sources()
        ]

    def read(self, source: Source) -> Iterator[Document | Problem]:
        """See `CorpusConfig.read`."""
        index = int(source.name.split("/", 1)[0])
        return self.parts[index].corpus.read(source)

    def holds_tokens(self) -> bool:
        """See `CorpusConfig.holds_tokens`: whether those of any part do."""
        return any(part.corpus.holds_tokens() for part in self.parts)

    def problems(self) -> list[Problem]:
        """See `CorpusConfig.problems`: the parts' too."""
        found = problems_of(lambda: corpus_parts(self))
        return found + [problem for part in self.parts for problem in part.corpus.problems()]

    def source_problems(self) -> list[Problem]:
        """See `CorpusConfig.source_problems`: those of all parts."""
        return [problem for part in self.parts for problem in part.corpus.source_problems()]
