"""Batch: what a task sees of one microbatch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from armillary.models.layers.documents import Documents, copied_to

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
        """The batch on another device; see `copied_to`."""
        return Batch(
            tokens=copied_to(self.tokens, device),
            labels=copied_to(self.labels, device),
            documents=self.documents.to(device),
            sample_ids=self.sample_ids,
        )
