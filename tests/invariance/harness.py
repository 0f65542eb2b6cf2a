"""Runs cases and measures how far each is from its oracle."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from armillary.checkpoint.ranks import Ranks
from armillary.checkpoint.state import gather_state
from armillary.foundation.progress import NoProgress
from armillary.parallel.mesh import Mesh
from armillary.recipe.overrides import Option, apply
from armillary.training.assembly import assemble, open_data
from armillary.training.train import train
from invariance.cases import CASES, Case
from invariance.recipes import base
from tiny_runs import events_of

EXACT = ("learning_rate", "tokens", "tokens_total", "samples", "sample_ids")
"""Fields of a step that are equal, not close."""


@dataclass(frozen=True)
class Trace:
    """What a run did, as its own event log tells it."""

    weights: dict[str, str]
    """SHA-256 of each initial weight, whole."""
    steps: list[dict[str, Any]]
    validation: list[float]


def run_cases(folder: str, names: Sequence[str]) -> dict[str, Trace | str]:
    """On each rank of a world: the cases in turn. A refusal is told as text, on all ranks alike."""
    torch.set_num_threads(1)
    traces: dict[str, Trace | str] = {}
    for name in names:
        torch._dynamo.reset()
        try:
            traces[name] = run_case(Path(folder), name, CASES.get(name) or oracle_of(name))
        except Exception as error:  # told by the test of this case; others go on
            if not isinstance(error, AssertionError | ValueError | RuntimeError):
                raise
            import traceback

            traces[name] = "".join(traceback.format_exception(error))
            if torch.distributed.get_world_size() > 1 and not hasattr(error, "problems"):
                raise  # the other ranks may be waiting in a collective
    return traces


def oracle_name(model: str) -> str:
    """The oracle of a model among the names of cases."""
    return f"oracle:{model}"


def oracle_of(name: str) -> Case:
    """One process, no option."""
    return Case(world=1, model=name.removeprefix("oracle:"))


def run_case(folder: Path, name: str, case: Case) -> Trace:
    """Trains one case in a run folder of its own; everything is read back from the log."""
    options = [Option(name, value) for name, value in case.leaves.items()]
    recipe = apply(base(folder, case.model), options=options)
    weights = initial_weights(recipe)
    run = folder / name.replace(":", "-")
    assert train(recipe, name=name, folder=run) == 0
    validation = [event["loss"] for event in events_of(run, "validation")]
    return Trace(weights, events_of(run, "step"), validation)


def initial_weights(recipe: Any) -> dict[str, str]:
    """Digest of every initial weight this rank has a part of, gathered whole."""
    mesh = Mesh.create(recipe.parallel, torch.device("cpu"))
    with closing(Ranks()) as ranks:
        data = open_data(recipe, NoProgress(), ranks)
        model = assemble(recipe, mesh, data).model
        digests = {}
        for name, tensor in gather_state(model)["model"].items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            digests[name] = hashlib.sha256(whole.contiguous().numpy().tobytes()).hexdigest()
        merged: dict[str, str] = {}
        for part in ranks.together(lambda: digests):  # stages hold different weights
            for name, digest in part.items():
                assert merged.setdefault(name, digest) == digest, f"ranks differ in {name}"
    return merged


@dataclass(frozen=True)
class Deviation:
    """The worst relative differences from the oracle over all steps."""

    loss: float
    gradient_norm: float
    parameter_norm: float
    parameter: str
    validation: float

    @property
    def worst(self) -> float:
        """The largest of them."""
        return max(self.loss, self.gradient_norm, self.parameter_norm, self.validation)


def deviation(trace: Trace, oracle: Trace) -> Deviation:
    """How far a run is from its oracle. Norms of parameters are relative to the global norm where
    they are less than a thousandth of it: a gradient that is nearly zero has no relative error.
    """
    loss = norm = parameter = 0.0
    name = ""
    for ours, theirs in zip(trace.steps, oracle.steps, strict=True):
        loss = max(loss, _relative(ours["loss"], theirs["loss"]))
        norm = max(norm, _relative(ours["gradient_norm"], theirs["gradient_norm"]))
        mine, oracles = ours["gradient_norms"], theirs["gradient_norms"]
        assert mine.keys() == oracles.keys()
        least = 1e-3 * theirs["gradient_norm"]
        for key, value in oracles.items():
            difference = abs(mine[key] - value) / max(value, least)
            if not difference <= parameter:
                parameter, name = difference, key
    pairs = zip(trace.validation, oracle.validation, strict=True)
    validation = max((_relative(a, b) for a, b in pairs), default=0.0)
    return Deviation(loss, norm, parameter, name, validation)


def exact_fields(oracle: Trace) -> list[str]:
    """Fields of a step beside `EXACT` that are equal, not close: the loads of experts."""
    return [field for field in oracle.steps[0] if field.startswith("expert_")]


def _relative(value: float, expected: float) -> float:
    difference = abs(value - expected) / abs(expected)
    return difference if math.isfinite(difference) else math.inf
