"""Requests packed into rows: which tokens are read, and where the scored ones stand. No model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from armillary.data.placement import place_best_fit
from armillary.evaluation.items import Request
from armillary.models.layers.documents import Documents

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of a request that are read in one row, as a document of its own."""

    request: int
    start: int
    """First input, counted over context and continuation."""
    length: int
    """Inputs."""
    scored: int
    """Inputs at its end whose label, the next token, is scored."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one forward pass reads."""

    tokens: Tensor
    """`[B, S]` int64."""
    documents: Documents
    """One for each piece; what is left of a row is another."""
    places: Tensor
    """`[N]` int64: scored inputs, counted over the flattened rows."""
    labels: Tensor
    """`[N]` int64: the token that follows each."""
    pieces: Integers
    """[N] which piece each belongs to."""

    def to(self, device: torch.device) -> Reading:
        """The same on another device."""
        moved = (self.tokens.to(device), self.documents.to(device))
        return Reading(*moved, self.places.to(device), self.labels.to(device), self.pieces)


class Rows:
    """All requests in rows of one length, few of them padded.

    Which row a piece is in, and which rows are read together, depends on the requests alone: ranks
    take turns, and what they find does not show how many they are.

    Args:
        requests: what to read.
        length: of a row, in tokens.
        stride: inputs between windows of a text that is longer than a row.
        at_once: rows that are read together.
    """

    def __init__(
        self, requests: Sequence[Request], *, length: int, stride: int, at_once: int
    ) -> None:
        assert 1 <= stride <= length
        self._requests, self._length = requests, length
        self.pieces = [
            piece
            for index, request in enumerate(requests)
            for piece in pieces_of(request, index, length=length, stride=stride)
        ]
        sizes = np.array([piece.length for piece in self.pieces], dtype=np.int64)
        row_of_piece, self.n_rows = place_best_fit(sizes, length)
        order = np.argsort(row_of_piece, kind="stable")
        self._order = order.tolist()
        self._ends = np.searchsorted(row_of_piece[order], np.arange(self.n_rows + 1)).tolist()
        self.at_once = max(1, min(at_once, self.n_rows))

    @property
    def n_readings(self) -> int:
        """Forward passes that read all rows."""
        return -(-self.n_rows // self.at_once)

    def reading(self, index: int) -> Reading:
        """Rows of forward pass `index`; one past the last reads padding and scores nothing."""
        tokens = np.zeros((self.at_once, self._length), dtype=np.int64)
        lengths: list[list[int]] = []
        places, labels, pieces = [], [], []
        for row in range(self.at_once):
            at, own = 0, []
            for number in self._pieces_of_row(index * self.at_once + row):
                piece = self.pieces[number]
                request = self._requests[piece.request]
                read = _tokens(request, piece.start, piece.start + piece.length + 1)
                end = at + piece.length
                tokens[row, at:end] = read[:-1]
                first = row * self._length + end - piece.scored
                places.append(np.arange(first, first + piece.scored))
                labels.append(read[len(read) - piece.scored :])
                pieces.append(np.full(piece.scored, number))
                own.append(piece.length)
                at = end
            lengths.append([*own, self._length - at] if at < self._length else own)
        return Reading(
            tokens=torch.from_numpy(tokens),
            documents=Documents.from_lengths(lengths),
            places=torch.from_numpy(_joined(places)),
            labels=torch.from_numpy(_joined(labels)),
            pieces=_joined(pieces),
        )

    def _pieces_of_row(self, row: int) -> list[int]:
        return self._order[self._ends[row] : self._ends[row + 1]] if row < self.n_rows else []


def pieces_of(request: Request, index: int, *, length: int, stride: int) -> list[Piece]:
    """The pieces in which a request is read; together they score each of its tokens once.

    A context that leaves no room is cut at its beginning. A continuation longer than a row is read
    in windows that begin every `stride` inputs, each of which scores what none before it did.
    """
    inputs = len(request.context) + len(request.continuation) - 1
    first = max(len(request.context) - 1, 0)  # the input whose label is the first one scored
    if inputs <= first or not request.continuation:
        return []
    if inputs - first <= length:
        start = max(0, inputs - length)
        return [Piece(index, start, inputs - start, inputs - first)]
    pieces: list[Piece] = []
    start, done = max(0, first - (length - stride)), first
    while done < inputs:
        end = min(inputs, start + length)
        pieces.append(Piece(index, start, end - start, end - done))
        start, done = start + stride, end
    return pieces


def _tokens(request: Request, start: int, end: int) -> tuple[int, ...]:
    """Of a context and continuation, without a copy of all of a long text."""
    border = len(request.context)
    continued = slice(max(0, start - border), max(0, end - border))
    return (*request.context[start:end], *request.continuation[continued])


def _joined(arrays: Sequence[Sequence[int] | Integers]) -> Integers:
    if not arrays:
        return np.zeros(0, dtype=np.int64)
    return np.concatenate([np.asarray(array, dtype=np.int64) for array in arrays])
