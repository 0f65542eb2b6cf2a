"""Loads what fits of a checkpoint, where that was asked for, and says what did not."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from armillary.checkpoint.find import Found
from armillary.checkpoint.load import stored_for_all
from armillary.checkpoint.ranks import Ranks
from armillary.checkpoint.state import Model, apply_state, gather_state, initialise_optimizers
from armillary.checkpoint.tensors import (
    Differences,
    compare,
    flatten,
    held_by_all,
    read_tensors,
)


def restore_what_fits(
    found: Found, model: Model, optimizers: Sequence[Optimizer], ranks: Ranks
) -> Differences:
    """Loads each tensor that the checkpoint has in the same shape and dtype; returns the others.

    A parameter keeps its first value if it has no match. Its optimizer state is loaded if the
    parameter and all of that state fit, and is none otherwise, as before its first step.
    """
    stored = stored_for_all(found, ranks)
    initialise_optimizers(optimizers)
    state = gather_state(model, optimizers)
    flat = flatten(state)
    differences = compare(held_by_all(flat, ranks), stored)
    unfit = {*differences.missing, *differences.shapes, *differences.dtypes}
    fresh = {_parameter_of(name) for name in unfit}
    for name, parameter in model.state_dict(keep_vars=True).items():
        if name in fresh:
            for optimizer in optimizers:
                optimizer.state.pop(parameter, None)
    loaded = {
        name: tensor
        for name, tensor in flat.items()
        if name not in unfit
        and not (name.startswith("optimizer.") and _parameter_of(name) in fresh)
    }
    read_tensors(found.place, found.folder, loaded, ranks, stored)
    apply_state(state, model, optimizers)
    return differences


def _parameter_of(name: str) -> str:
    """`a.weight` of `model.a.weight` and of `optimizer.a.weight.exp_avg`."""
    part, _, rest = name.partition(".")
    return rest.rpartition(".")[0] if part == "optimizer" else rest
