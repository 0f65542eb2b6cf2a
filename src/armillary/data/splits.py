"""Split: the tokens of many documents end to end, and where each document begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Bits:
    """Flags kept eight to a byte, the first in a byte's highest bit; read where they are asked."""

    def __init__(self, packed: NDArray[np.uint8], count: int) -> None:
        self._packed = packed  # [ceil(count / 8)]
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, where: slice | Integers) -> Flags:
        if isinstance(where, slice):
            start, stop, step = where.indices(self._count)
            assert step == 1, "consecutive flags"
            packed = self._packed[start // 8 : -(-stop // 8)]
            flags = np.unpackbits(packed)[start % 8 : start % 8 + max(stop - start, 0)]
            return flags.astype(np.bool_)
        return (self._packed[where // 8] >> (7 - where % 8).astype(np.uint8) & 1).astype(np.bool_)


class TextTable(Sequence[str]):
    """Strings read on demand from one file: text end to end, and where each string begins."""

    def __init__(self, text: NDArray[np.uint8], offsets: Integers) -> None:
        self._text = text
        self._offsets = offsets  # [N + 1]

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        start, end = self._offsets[position], self._offsets[position + 1]
        return self._text[start:end].tobytes().decode("utf-8", "surrogateescape")


class Split:
    """One split of one corpus: a token stream, read from disk as needed, and its documents.

    Documents come in the order of their ids' UTF-8 bytes. A document's tokens include the BOS and
    EOS that the recipe asks for; its bytes are those of its text in UTF-8, or where some tokens are
    only read, those of the text that is scored.

    Args:
        tokens: [T] unsigned integers (uint16 or uint32), usually a memory map.
        document_offsets: [N + 1] where each document begins in `tokens`; the last is T.
        document_bytes: [N] UTF-8 bytes of each document's text.
        ids: the N document ids.
        text: the documents' UTF-8 text end to end (held-out splits only), in memory or as a file.
        first_token_bytes: UTF-8 bytes that a document's first token stands for; None where that is
            a BOS, which stands for none.
        scored: [T] whether each token is predicted where it is a label; None is all but each
            document's first.
    """

    def __init__(
        self,
        tokens: NDArray[Any],
        document_offsets: Integers | Sequence[int],
        document_bytes: Integers | Sequence[int] | None = None,
        ids: Sequence[str] | None = None,
        text: bytes | Path | None = None,
        *,
        first_token_bytes: Callable[[int], int] | None = None,
        scored: Flags | Bits | None = None,
    ) -> None:
        self.tokens = tokens
        self.scored = scored
        self.document_offsets: Integers = np.asarray(document_offsets, dtype=np.int64)
        count = len(self.document_offsets) - 1
        self.document_bytes: Integers = (
            np.diff(self.document_offsets)
            if document_bytes is None
            else np.asarray(document_bytes, dtype=np.int64)
        )
        self.ids: Sequence[str] = [str(i) for i in range(count)] if ids is None else ids
        self._text = text
        self._first_token_bytes = first_token_bytes
        assert count >= 0, "document_offsets holds at least the 0 at which documents begin"
        assert int(self.document_offsets[0]) == 0
        assert int(self.document_offsets[-1]) == len(tokens)
        assert len(self.document_bytes) == count
        assert len(self.ids) == count
        assert scored is None or len(scored) == len(tokens)

    @property
    def n_documents(self) -> int:
        """How many documents, those without text included."""
        return len(self.document_offsets) - 1

    @property
    def n_tokens(self) -> int:
        """How many tokens, BOS and EOS included."""
        return len(self.tokens)

    @property
    def n_bytes(self) -> int:
        """UTF-8 bytes of all documents' text: the denominator of bits per byte."""
        return int(self.document_bytes.sum())

    def document(self, index: int) -> NDArray[Any]:
        """The tokens of one document."""
        tokens: NDArray[Any] = self.tokens[
            self.document_offsets[index] : self.document_offsets[index + 1]
        ]
        return tokens

    def unscored_bytes(self, documents: Integers) -> int:
        """What `document_bytes` counts of some documents' first tokens, which nothing predicts."""
        if self._first_token_bytes is None or self.scored is not None:
            return 0
        firsts, counts = np.unique(
            self.tokens[self.document_offsets[documents]], return_counts=True
        )
        sizes = [self._first_token_bytes(token) for token in firsts.tolist()]
        return int(counts @ np.array(sizes, np.int64))

    def documents_bytes(self) -> Iterator[bytes]:
        """The UTF-8 text that `document_bytes` counts of each document; where the store kept it."""
        if self._text is None:
            raise ValueError("only the validation split keeps the text of its documents")
        if isinstance(self._text, bytes):
            start = 0
            for length in self.document_bytes.tolist():
                yield self._text[start : start + length]
                start += length
            return
        with self._text.open("rb") as file:
            for length in self.document_bytes.tolist():
                yield file.read(length)
