"""Batches of the steps to come, made in the background."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from armillary.data.batch import Batch
from armillary.data.prefetch import Prefetcher
from armillary.training.assembly import Assembly
from armillary.training.state import Position
from armillary.training.step_shape import WHOLE, Share


@dataclass(frozen=True, slots=True)
class StepInput:
    """This rank's microbatches of one optimizer step."""

    microbatches: list[Batch]
    rows: list[list[int]]
    """The places in the step of the rows of each."""
    weights: tuple[int, ...]
    """Of each term of the loss, the main one first: valid tokens in them; 0 where another rank with
    the same rows counts them."""
    samples: tuple[int, int]
    """Global sample positions [first, last) of the whole step."""


def feed(
    assembly: Assembly, position: Position, *, until: int, share: Share = WHOLE
) -> Prefetcher[StepInput]:
    """The inputs of the steps from `position` to step `until`."""
    sequences = assembly.shape.sequences
    begin = replace(position)  # the position itself moves on, while the thread makes batches

    def makers() -> Iterator[Callable[[], StepInput]]:
        at = begin
        for _ in range(begin.step, until):
            samples = at.samples(sequences)
            at = at.after(samples)
            yield partial(make_input, assembly, *samples, share)

    return Prefetcher(makers(), depth=assembly.recipe.data.prefetch)


def make_input(assembly: Assembly, first: int, last: int, share: Share = WHOLE) -> StepInput:
    """This rank's part of the step over sample positions [first, last)."""
    rows, dataset = assembly.shape.rows(share), assembly.data.training
    microbatches = [dataset.batch(first, last, rows=each) for each in rows]
    return input_of(assembly, microbatches, rows, (first, last))


def input_of(
    assembly: Assembly, microbatches: list[Batch], rows: list[list[int]], samples: tuple[int, int]
) -> StepInput:
    """A step's input from this rank's microbatches, which are on the host."""
    terms = zip(*(assembly.task.weights(batch) for batch in microbatches), strict=True)
    weights = tuple(sum(term) * assembly.model.counts_rows for term in terms)
    device = assembly.mesh.device
    return StepInput([batch.to(device) for batch in microbatches], rows, weights, samples)
