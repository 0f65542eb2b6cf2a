"""Reads corpora for tests of them."""

from __future__ import annotations

from armillary.data.corpus import CorpusConfig, Document
from armillary.foundation.errors import Problem, UserError


def read(corpus: CorpusConfig) -> list[tuple[str, str | list[int]]]:
    """Ids and contents of all documents; a problem fails the test."""
    found = [item for source in corpus.sources() for item in corpus.read(source)]
    documents = [item for item in found if isinstance(item, Document)]
    assert len(documents) == len(found), [item for item in found if isinstance(item, Problem)]
    return [(one.id, one.text if one.tokens is None else one.tokens.tolist()) for one in documents]


def problems(corpus: CorpusConfig) -> list[str]:
    """What is wrong, found at listing or at reading."""
    try:
        sources = corpus.sources()
    except UserError as error:
        return [problem.render() for problem in error.problems]
    items = [item for source in sources for item in corpus.read(source)]
    return [item.render() for item in items if isinstance(item, Problem)]
