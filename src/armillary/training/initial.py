"""The weights that a new run begins with, where they are not random."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from armillary.checkpoint.find import Found
from armillary.checkpoint.hugging_face.check import check_conversion
from armillary.checkpoint.hugging_face.load import load_weights
from armillary.checkpoint.hugging_face.weights import (
    Weights,
    checkpoint_weights,
    open_weights,
)
from armillary.checkpoint.ranks import Failure, Ranks
from armillary.foundation.component import name_of
from armillary.foundation.errors import Problem, RunError
from armillary.models.config import ModelConfig
from armillary.models.layers.low_rank import is_factor
from armillary.recipe.diff import diff
from armillary.telemetry.format import byte_count
from armillary.training.assembly import Assembly

INITIAL = "initial.weights"
"""Under `as` in the provenance of a run that began so, and not by `--resume`."""

_WITHOUT_EFFECT = ("model.max_seq_len", "model.attention", "model.init_", "model.vocab_size")
"""Beginnings of leaves that may differ from those of the weights: logits do not show it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Filled:
    """What weights a model was given."""

    provenance: dict[str, Any]
    """For the manifests of the run's checkpoints."""
    notes: tuple[str, ...]
    """For people."""


def fill_from_recipe(assembly: Assembly, check: Callable[[], None] = lambda: None) -> Filled:
    """Loads `initial.weights`; every rank calls it alike.

    What is of Hugging Face format is checked as by an import, by rank 0.

    Raises:
        UserError: there are no such weights, they are of another model, or our modules do not give
            what they should with them.
        RunError: they could not be read.
    """
    address, model = assembly.recipe.initial.weights, assembly.recipe.model
    notes = []
    with closing(Ranks()) as ranks, _reading(address):
        weights = ranks.main_first(lambda: open_weights(address, model))  # one fetches, all find
        if weights.foreign is not None:
            parts = ranks.on_main(lambda: check_conversion(weights, model))
            notes.append(f"checked: {len(parts)} parts compute what a reference does")
        filled = _fill(assembly, weights, ranks, check)
    provenance = {"as": INITIAL, **filled.provenance}
    return Filled(provenance=provenance, notes=(*filled.notes, *notes))


def fill_from_checkpoint(
    assembly: Assembly, found: Found, check: Callable[[], None] = lambda: None
) -> Filled:
    """Loads a checkpoint that holds weights alone; see `fill_from_recipe`."""
    with closing(Ranks()) as ranks, _reading(found.path):
        weights = ranks.together(lambda: checkpoint_weights(found))[ranks.rank]
        return _fill(assembly, weights, ranks, check)


@contextmanager
def _reading(address: str) -> Iterator[None]:
    """Says what could not be read, where the machine fails on some rank."""
    try:
        yield
    except Failure as failure:
        raise RunError(Problem(f"cannot read {address}: {failure}")) from failure


def _fill(assembly: Assembly, weights: Weights, ranks: Ranks, check: Callable[[], None]) -> Filled:
    loaded = load_weights(assembly.model, weights, ranks, is_new=is_factor, check=check)
    read = [byte_count(count) for count in dict.fromkeys(loaded.bytes_read)]
    each = f"{read[0]} read by each rank" if len(read) == 1 else f"read by ranks: {', '.join(read)}"
    notes = [f"weights of {weights.address}: {each}"]
    notes += [f"left out of {weights.address}: {line}" for line in weights.left_out]
    if loaded.fresh:
        kind = name_of(type(assembly.recipe.tuning))
        notes.append(f"{len(loaded.fresh)} tensors of tuning = {kind} are new")
    if weights.foreign is not None:
        notes += other_leaves(weights.address, weights.foreign.model, assembly.recipe.model)
    provenance: dict[str, Any] = {"from": weights.address}
    if weights.found is not None:
        provenance["origin"] = weights.found.manifest["provenance"]
    return Filled(provenance=provenance, notes=tuple(notes))


def other_leaves(address: str, written: ModelConfig, model: ModelConfig) -> list[str]:
    """How a model differs from the one that was written, where shapes do not show it."""
    changed = ", ".join(
        f"{one.name} ({one.first} -> {one.second})"
        for one in diff(written, model)
        if not f"model.{one.name}".startswith(_WITHOUT_EFFECT)
    )
    return [f"the model is not quite the one of {address}: {changed}"] if changed else []
