"""Validation: a fixed set, one sum, the same figure for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from armillary.data.dataset import ValidationDataset
from armillary.foundation.progress import Progress
from armillary.parallel.mesh import Mesh
from armillary.parallel.model import LOSS_AXES, ParallelModel
from armillary.tasks.task import TaskConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationResult:
    """How well held-out documents are predicted."""

    loss: float
    """Nats per scored token."""
    bits_per_byte: float
    """Bits for the text of the documents, divided by its bytes; comparable across tokenizers."""
    tokens: int
    """Tokens scored."""


@torch.no_grad()
def validate(
    model: ParallelModel,
    task: TaskConfig,
    dataset: ValidationDataset,
    *,
    mesh: Mesh,
    rows_at_once: int,
    progress: Progress,
    check: Callable[[], None] = lambda: None,
) -> ValidationResult:
    """Scores every row of `dataset` once, in turns of `rows_at_once` rows per rank.

    All ranks make the same number of calls; rows past the end are padding that scores nothing.
    Sums are added in float64, so that the split over ranks does not show.

    Args:
        check: Called between turns; may raise to leave early, then on all ranks alike.
    """
    turn = rows_at_once * mesh.data_size
    offsets = [mesh.data_rank * rows_at_once + row for row in range(rows_at_once)]
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    was_training = model.training
    model.eval()
    try:
        with progress.task("validating", total=dataset.n_rows, unit="rows") as advance:
            for first in range(0, dataset.n_rows, turn):
                check()
                batch = dataset.batch(first, first + turn, rows=offsets).to(mesh.device)
                total += model.evaluate(task, batch)
                advance(min(turn, dataset.n_rows - first))
    finally:
        model.train(was_training)
    nats = float(mesh.sum_over(total, LOSS_AXES).item())
    return ValidationResult(
        loss=nats / dataset.n_tokens,
        bits_per_byte=nats / math.log(2) / dataset.n_bytes,
        tokens=dataset.n_tokens,
    )
