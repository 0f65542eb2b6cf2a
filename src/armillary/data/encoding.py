"""Documents become tokens: their ids, which of them are predicted, and what text that is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armillary.data.corpus import Document, Span
from armillary.data.tokenizer import Ids, Tokenizer
from armillary.foundation.errors import Problem, UserError

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a piece of a corpus becomes tokens."""

    tokenizer_folder: str
    bos: bool
    eos: bool
    held_out_below: int
    """Documents whose hash lies below it are held out."""
    dtype: str
    """`uint16` or `uint32`."""
    masks: bool = False
    """Whether some tokens are only read; see `CorpusConfig.masks`."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of one document."""

    tokens: NDArray[Any]
    """[T] ids, BOS and EOS included."""
    text: bytes
    """UTF-8 text that counts in bits per byte: all of it, or with masks what is predicted."""
    scored: Flags | None = None
    """[T] which tokens are predicted; None without masks."""


def encode_documents(
    documents: Sequence[Document], tokenizer: Tokenizer, how: Encoding
) -> list[Encoded]:
    """The tokens of some documents of one corpus, in order.

    Raises:
        UserError: a document has tokens that the vocabulary has not.
    """
    texts = iter(
        tokenizer.encode_batch(
            [one.text for one in documents if one.tokens is None and one.marks is None]
        )
    )
    encoded = []
    for one in documents:
        if one.marks is not None:
            encoded.append(_marked(one, tokenizer))
        elif one.tokens is not None:
            encoded.append(_given(one, tokenizer, how))
        else:
            encoded.append(_plain(one, next(texts), tokenizer, how))
    return encoded


def _plain(document: Document, ids: Ids, tokenizer: Tokenizer, how: Encoding) -> Encoded:
    tokens = _framed(ids, tokenizer, how.dtype, bos=how.bos, eos=how.eos)
    text = document.text.encode("utf-8")
    if not how.masks:
        return Encoded(tokens, text)
    unseen = 0 if how.bos else tokenizer.byte_count(int(tokens[0]))
    return Encoded(tokens, text[unseen:], _all_but_the_first(len(tokens)))


def _given(document: Document, tokenizer: Tokenizer, how: Encoding) -> Encoded:
    """A document that came as tokens."""
    ids = document.tokens
    assert ids is not None
    _check_vocabulary(document, tokenizer)
    if not how.masks:
        bos = how.bos and ids[0] != tokenizer.bos_id
        eos = how.eos and ids[-1] != tokenizer.eos_id
        tokens = _framed(ids, tokenizer, how.dtype, bos=bos, eos=eos)
        return Encoded(tokens, tokenizer.decode(ids.tolist()).encode("utf-8"))
    scored = _all_but_the_first(len(ids))
    if document.scored is not None:
        assert len(document.scored) == len(ids), "a flag for each token"
        scored &= document.scored
    stretches = [tokenizer.decode(ids[start:end].tolist()) for start, end in _runs(scored)]
    return Encoded(ids.astype(how.dtype), "".join(stretches).encode("utf-8"), scored)


def _marked(document: Document, tokenizer: Tokenizer) -> Encoded:
    """A document whose marks say what is predicted, in characters.

    A token is predicted when any of its characters is. Special tokens stand for no text.
    """
    assert document.marks is not None
    found = tokenizer.encode_marked(document.text, document.marks.template)
    wanted = np.zeros(len(document.text) + 1, np.int64)  # characters predicted before each one
    for start, end in document.marks.scored:
        wanted[start + 1 : end + 1] = 1
    wanted = np.cumsum(wanted)
    scored = wanted[found.ends] > wanted[found.starts]
    scored[:1] = False  # nothing predicts it
    covered = np.zeros(len(document.text), np.bool_)
    for start, end in _spans_of(found.starts, found.ends, scored & ~found.special):
        covered[start:end] = True
    text = "".join(document.text[start:end] for start, end in _runs(covered))
    return Encoded(found.ids, text.encode("utf-8"), scored)


def _framed(
    ids: NDArray[Any], tokenizer: Tokenizer, dtype: str, *, bos: bool, eos: bool
) -> NDArray[Any]:
    """The ids with a BOS before them, and an EOS after them."""
    tokens = np.empty(len(ids) + bos + eos, dtype)
    if bos:
        tokens[0] = tokenizer.bos_id
    tokens[int(bos) : len(tokens) - int(eos)] = ids
    if eos:
        tokens[-1] = tokenizer.eos_id
    return tokens


def _all_but_the_first(count: int) -> Flags:
    return np.arange(count) > 0


def _check_vocabulary(document: Document, tokenizer: Tokenizer) -> None:
    ids = document.tokens
    assert ids is not None
    wrong = np.flatnonzero((ids < 0) | (ids >= tokenizer.vocab_size))
    if wrong.size:
        raise UserError(
            Problem(
                f"document {document.id}: token {wrong[0]} is {ids[wrong[0]]}",
                f"0 to {tokenizer.vocab_size - 1}, the vocabulary of data.tokenizer",
                "choose the tokenizer that the corpus was made with, and the corpus's right dtype",
            )
        )


def _spans_of(starts: NDArray[Any], ends: NDArray[Any], chosen: Flags) -> Iterator[Span]:
    yield from zip(starts[chosen].tolist(), ends[chosen].tolist(), strict=True)


def _runs(flags: Flags) -> Iterator[Span]:
    """The stretches of consecutive flags that are set."""
    edges = np.flatnonzero(np.diff(flags.astype(np.int8), prepend=0, append=0)).tolist()
    yield from zip(edges[::2], edges[1::2], strict=True)
