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
    weights: tuple[int, ...]
    """Of each term of the loss, the main one first: valid tokens in them; 0 where another rank with
    the same rows counts them."""
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
    terms = zip(*(assembly.task.weights(batch) for batch in microbatches), strict=True)
    weights = tuple(sum(term) * assembly.model.counts_rows for term in terms)
    device = assembly.mesh.device
    return StepInput([batch.to(device) for batch in microbatches], weights, (first, last))
