"""Batch: what a task sees of one microbatch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from armillary.models.layers.documents import Documents

IGNORED = -100
"""The label of an input that is not counted."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of packed documents with the label of every input."""

    tokens: Tensor
    """[B, S] int64."""
    labels: Tensor
    """[B, S] int64: the next token of the same document, or -100 where there is none to count."""
    documents: Documents
    """Where the documents of each row begin; padding is a document of its own."""
    sample_ids: tuple[int, ...]
    """[B] stable ids of the samples, whatever the order or the mesh; -1 is a row of padding."""

    def to(self, device: torch.device | str) -> Batch:
        """The batch on another device; the copy is asynchronous where memory is pinned."""
        return Batch(
            tokens=self.tokens.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            documents=self.documents.to(device),
            sample_ids=self.sample_ids,
        )

    def split(self, microbatch_rows: int) -> list[Batch]:
        """The rows in order, at most `microbatch_rows` at a time."""
        assert microbatch_rows >= 1
        return [
            self._rows(slice(begin, begin + microbatch_rows))
            for begin in range(0, len(self.sample_ids), microbatch_rows)
        ]

    def _rows(self, rows: slice) -> Batch:
        return Batch(
            tokens=self.tokens[rows],
            labels=self.labels[rows],
            documents=Documents(
                lengths=self.documents.lengths[rows],
                positions=self.documents.positions[rows],
                starts=self.documents.starts[rows],
            ),
            sample_ids=self.sample_ids[rows],
        )
