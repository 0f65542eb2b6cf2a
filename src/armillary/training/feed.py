"""Batches of the steps to come, made in the background."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from armillary.data.batch import Batch
from armillary.data.prefetch import Prefetcher
from armillary.training.assembly import Assembly


@dataclass(frozen=True, slots=True)
class StepInput:
    """This rank's microbatches of one optimizer step."""

    microbatches: list[Batch]
    weight: int
    """Valid tokens in them; 0 where another rank with the same rows counts them."""
    samples: tuple[int, int]
    """Global sample positions [first, last) of the whole step."""


def feed(assembly: Assembly, *, cursor: int, steps: int) -> Prefetcher[StepInput]:
    """The inputs of the next `steps` steps, from sample position `cursor` on."""
    sequences = assembly.shape.sequences

    def makers() -> Iterator[Callable[[], StepInput]]:
        for index in range(steps):
            first = cursor + index * sequences
            yield partial(_make, assembly, first, first + sequences)

    return Prefetcher(makers(), depth=assembly.recipe.data.prefetch)


def _make(assembly: Assembly, first: int, last: int) -> StepInput:
    microbatches = [
        assembly.data.training.batch(first, last, rows=rows) for rows in assembly.shape.rows()
    ]
    counted = microbatches if assembly.model.counts_rows else []
    weight = sum(assembly.task.weight(batch) for batch in counted)
    device = assembly.mesh.device
    return StepInput([batch.to(device) for batch in microbatches], weight, (first, last))
