"""Packing: which tokens of a stream of documents make one sample of `seq_len` inputs.

A packing is a plan: it knows document offsets and lengths, never tokens. `sample(i)` answers with
the stream positions of the inputs, which of them are scored, and the lengths of the documents (or
pieces of documents) in the row. The label of an input is always the next token of the stream, so
a label is right even where a document continues in another sample. The first token of a document
is the label of nothing. Document boundaries come from the offsets, never from token values.

numpy only.
"""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from armillary.data.placement import place_best_fit
from armillary.foundation.component import Component, component
from armillary.foundation.errors import Problem, UserError

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Sample:
    """One row before its tokens are read."""

    inputs: slice | Integers
    """Where the inputs stand in the stream; at most seq_len of them."""
    scored: Flags
    """[inputs] whether the label of each (the next token of the stream) counts."""
    lengths: tuple[int, ...]
    """Lengths of the documents in the row; they sum to the number of inputs."""


class Packing(Protocol):
    """A plan of samples over one stream of documents."""

    @property
    def n_samples(self) -> int:
        """How many samples the stream makes: one epoch."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that the samples depend on, other than the tokens themselves."""

    @property
    def remark(self) -> str:
        """What of the stream is not used, where a person should know; empty otherwise."""

    def sample(self, index: int) -> Sample:
        """Sample `index`, 0 <= index < n_samples."""


class PackingConfig(Component, ABC):
    """How documents become samples of one length."""

    __slots__ = ()

    @abstractmethod
    def build(self, document_offsets: Integers, seq_len: int) -> Packing:
        """The plan for a stream whose documents begin at `document_offsets` (the last is its end).

        Raises:
            UserError: the stream does not hold one sample.
        """

    def problems(self) -> list[Problem]:
        """What is wrong with the values themselves."""
        return []


@component("concatenate")
@dataclass(frozen=True, kw_only=True, slots=True)
class Concatenate(PackingConfig):
    """All documents end to end, cut every seq_len tokens; long documents continue in the next cut.

    Tokens after the last whole cut (fewer than seq_len) are left out of the epoch.
    """

    def build(self, document_offsets: Integers, seq_len: int) -> Packing:
        """See `PackingConfig.build`."""
        return _Windows(document_offsets, seq_len)


@component("best-fit")
@dataclass(frozen=True, kw_only=True, slots=True)
class BestFit(PackingConfig):
    """Whole documents, each in the fullest row that still has room; rows are padded at the end.

    Documents longer than seq_len are cut into pieces of seq_len first; all tokens are used.
    (Best-fit decreasing; for language models: Ding et al. 2024, "Fewer truncations improve
    language modeling", arXiv 2404.10830.)
    """

    def build(self, document_offsets: Integers, seq_len: int) -> Packing:
        """See `PackingConfig.build`."""
        plan = PieceRows(document_offsets, seq_len, stride=seq_len)
        if plan.n_samples == 0:
            raise UserError(_too_short(document_offsets, seq_len, needed=2))
        return plan


TOO_LONG_CHOICES = ("cut", "drop")


@component("whole-documents")
@dataclass(frozen=True, kw_only=True, slots=True)
class WholeDocuments(PackingConfig):
    """Whole documents as in best-fit; of those longer than seq_len no later piece is used.

    For conversations: no row begins in the middle of one.
    """

    too_long: str = "cut"
    """What becomes of longer documents: cut (their beginning is used) or drop (nothing of them)."""

    def problems(self) -> list[Problem]:
        """See `PackingConfig.problems`."""
        if self.too_long in TOO_LONG_CHOICES:
            return []
        message = f"data.packing.too_long = {self.too_long!r}"
        return [Problem(message, ", ".join(TOO_LONG_CHOICES))]

    def build(self, document_offsets: Integers, seq_len: int) -> Packing:
        """See `PackingConfig.build`."""
        fits = np.diff(document_offsets) <= seq_len + 1  # the last token is only a label
        chosen = None if self.too_long == "cut" else np.flatnonzero(fits)
        plan = PieceRows(
            document_offsets, seq_len, stride=seq_len, documents=chosen, most_inputs=seq_len
        )
        if plan.n_samples == 0:
            raise UserError(
                _too_short(document_offsets, seq_len, needed=2)
                if fits.all()
                else _all_too_long(len(fits), seq_len)
            )
        if count := int((~fits).sum()):
            done = "only their beginnings are" if self.too_long == "cut" else "they are not"
            plan.remark = (
                f"{count} of {len(fits)} documents are longer than budget.seq_len = {seq_len}: "
                f"{done} trained on (data.packing.too_long = {self.too_long})"
            )
        return plan


class _Windows:
    """Sample i is stream[i * seq_len : (i + 1) * seq_len]."""

    remark = ""

    def __init__(self, document_offsets: Integers, seq_len: int) -> None:
        assert seq_len >= 1
        self._seq_len = seq_len
        self._offsets = _without_repeats(document_offsets)
        self.n_samples = int(document_offsets[-1]) // seq_len
        if self.n_samples == 0:
            raise UserError(_too_short(document_offsets, seq_len, needed=seq_len))
        self.fingerprint = _fingerprint("concatenate", seq_len, self._offsets)

    def sample(self, index: int) -> Sample:
        """The window, with labels that cross into another document not scored."""
        start = index * self._seq_len
        end = start + self._seq_len
        first, last = np.searchsorted(self._offsets, [start + 1, end + 1])
        bounds = self._offsets[first:last] - start  # of documents that begin in (start, end]
        scored = np.ones(self._seq_len, dtype=np.bool_)
        scored[bounds - 1] = False
        cuts = [0, *bounds.tolist()]
        if cuts[-1] != self._seq_len:
            cuts.append(self._seq_len)
        lengths = tuple(b - a for a, b in itertools.pairwise(cuts))
        return Sample(slice(start, end), scored, lengths)


class PieceRows:
    """Pieces of documents placed in rows, every token of every document scored exactly once.

    A document of n + 1 tokens has n inputs (its last token is only ever a label). Piece k of it is
    inputs [k * stride, k * stride + seq_len); it scores those that no earlier piece reached, so
    with stride < seq_len every piece but the first brings seq_len - stride inputs of context.

    Args:
        document_offsets: where documents begin in the stream; the last is its end.
        seq_len: inputs in a row.
        stride: inputs between the beginnings of pieces, 1 <= stride <= seq_len.
        documents: which documents to use; None is all.
        most_inputs: inputs of a document that are used, from its beginning; None is all.
    """

    remark = ""

    def __init__(
        self,
        document_offsets: Integers,
        seq_len: int,
        *,
        stride: int,
        documents: Integers | None = None,
        most_inputs: int | None = None,
    ) -> None:
        assert 1 <= stride <= seq_len
        begins, ends = document_offsets[:-1], document_offsets[1:]
        if documents is not None:
            begins, ends = begins[documents], ends[documents]
        inputs = np.minimum(ends - begins - 1, most_inputs or np.iinfo(np.int64).max)
        starts, lengths, contexts = _pieces(begins, inputs, seq_len, stride)
        row_of_piece, n_rows = place_best_fit(lengths, seq_len)
        # Pieces of a row stand together, longest first.
        by_row = np.lexsort((np.arange(len(lengths)), -lengths, row_of_piece))
        self._starts = starts[by_row]
        self._lengths = lengths[by_row]
        self._contexts = contexts[by_row]
        self._rows = np.searchsorted(row_of_piece[by_row], np.arange(n_rows + 1))  # [rows + 1]
        self.n_samples = n_rows
        self.n_scored = int((lengths - contexts).sum())
        """Labels of all samples together."""
        self.fingerprint = _fingerprint(
            "pieces", seq_len, self._starts, self._lengths, self._contexts, self._rows
        )

    def sample(self, index: int) -> Sample:
        """The pieces of one row end to end; what is left of the row is for the caller to pad."""
        row = slice(self._rows[index], self._rows[index + 1])
        lengths = self._lengths[row]
        total = int(lengths.sum())
        begins = np.cumsum(lengths) - lengths  # of each piece in the row
        within = np.arange(total) - np.repeat(begins, lengths)
        return Sample(
            np.repeat(self._starts[row], lengths) + within,
            within >= np.repeat(self._contexts[row], lengths),
            tuple(lengths.tolist()),
        )


def _without_repeats(offsets: Integers) -> Integers:
    """Documents without tokens bound nothing. As a rule there are none, and a map stays a map."""
    return np.unique(offsets) if np.any(offsets[1:] == offsets[:-1]) else offsets


def _pieces(
    begins: Integers, inputs: Integers, seq_len: int, stride: int
) -> tuple[Integers, Integers, Integers]:
    """(stream start, length, inputs of context) of all pieces, in the order of the documents."""
    extra = np.maximum(inputs - seq_len, 0)
    counts = np.where(inputs > 0, 1 + -(-extra // stride), 0)  # pieces of each document
    document = np.repeat(np.arange(len(inputs)), counts)
    piece = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    offset = piece * stride
    lengths = np.minimum(inputs[document] - offset, seq_len)
    contexts = np.where(piece > 0, seq_len - stride, 0)
    return begins[document] + offset, lengths, contexts


def _too_short(document_offsets: Integers, seq_len: int, *, needed: int) -> Problem:
    tokens = int(document_offsets[-1])
    return Problem(
        f"data.corpus has {tokens} tokens in {len(document_offsets) - 1} documents, "
        f"too few for one sample of budget.seq_len = {seq_len}",
        f"at least {needed} tokens",
        f"--budget.seq-len {tokens}, or a larger corpus" if tokens >= 2 else "a larger corpus",
    )


def _all_too_long(documents: int, seq_len: int) -> Problem:
    return Problem(
        f"data.packing drops documents longer than budget.seq_len = {seq_len}, and none of "
        f"{documents} is short enough with 2 tokens or more",
        "a document that fits",
        "a larger --budget.seq-len, or --data.packing.too-long cut",
    )


def _fingerprint(kind: str, seq_len: int, *arrays: Integers) -> str:
    digest = hashlib.sha256(f"{kind} {seq_len}".encode())
    for array in arrays:
        digest.update(np.ascontiguousarray(array, dtype="<i8").data)
        digest.update(b"|")
    return digest.hexdigest()
