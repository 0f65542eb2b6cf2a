"""Which documents a tokenizer learns from: the training documents with the smallest hashes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from armillary.data.corpus import CorpusConfig, Source
from armillary.data.pieces import Arrays, changed_while_building
from armillary.foundation.errors import Problem


def choose_training_text(
    corpora: Sequence[tuple[CorpusConfig, Sequence[Source]]],
    scans: Sequence[Iterable[Arrays]],
    held_out_below: int,
    most_bytes: int,
) -> list[str]:
    """Training documents in the order of their hashes, `most_bytes` of UTF-8 at most.

    The order depends on ids alone: neither on how the corpus lies in files nor on workers. The
    last document is cut so that the sum does not exceed the limit.

    Args:
        corpora: by part, the corpus and its sources in order.
        scans: by part, what `scan_piece` found, in order.
        held_out_below: documents with a smaller hash are held out and taken no text from.
        most_bytes: the limit.
    """
    chosen = _Chosen(most_bytes)
    for part, pieces in enumerate(scans):
        first_source = 0
        for piece in pieces:
            per_source = piece["per_source"]
            source = np.repeat(np.arange(len(per_source)), per_source)
            starts = np.cumsum(per_source) - per_source
            within = np.arange(len(source)) - starts[source]
            keep = piece["hashes"] >= np.uint64(held_out_below)
            place = np.stack(
                [np.full(len(source), part), first_source + source, within], axis=1
            ).astype(np.int64)
            chosen.add(piece["hashes"][keep], piece["sizes"][keep], place[keep])
            first_source += len(per_source)
    return _read(corpora, chosen.places(), most_bytes)


class _Chosen:
    """The documents with the smallest hashes that fill a number of bytes; forgets the rest."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._hashes: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._sizes: NDArray[np.int64] = np.zeros(0, np.int64)
        self._places: NDArray[np.int64] = np.zeros((0, 3), np.int64)

    def add(
        self, hashes: NDArray[np.uint64], sizes: NDArray[np.int64], places: NDArray[np.int64]
    ) -> None:
        """Offers documents; each place is (part, source, document within the source)."""
        self._hashes = np.concatenate([self._hashes, hashes])
        self._sizes = np.concatenate([self._sizes, sizes])
        self._places = np.concatenate([self._places, places])
        order = np.argsort(self._hashes, kind="stable")
        before = np.cumsum(self._sizes[order]) - self._sizes[order]
        order = order[before < self._most_bytes]
        self._hashes, self._sizes = self._hashes[order], self._sizes[order]
        self._places = self._places[order]

    def places(self) -> list[tuple[int, int, int]]:
        """The chosen documents in the order of their hashes."""
        return [(part, source, within) for part, source, within in self._places.tolist()]


def _read(
    corpora: Sequence[tuple[CorpusConfig, Sequence[Source]]],
    places: list[tuple[int, int, int]],
    most_bytes: int,
) -> list[str]:
    found: dict[tuple[int, int, int], str] = {}
    wanted = set(places)
    for part, index in sorted({(part, source) for part, source, _ in places}):
        corpus, sources = corpora[part]
        for within, text in enumerate(_texts(corpus, sources[index])):
            if (part, index, within) in wanted:
                found[part, index, within] = text
    texts, left = [], most_bytes
    for place in places:
        if place not in found:
            raise changed_while_building(corpora[place[0]][1][place[1]])
        raw = found[place].encode("utf-8")[:left]
        texts.append(raw.decode("utf-8", "ignore"))
        left -= len(raw)
    return texts


def _texts(corpus: CorpusConfig, source: Source) -> Iterator[str]:
    for item in corpus.read(source):
        if isinstance(item, Problem):
            raise changed_while_building(source)
        if not item.is_empty:
            yield item.text
