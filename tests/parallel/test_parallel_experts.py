"""A decoder with experts, trained on every arrangement of them, against one process."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from armillary.data.batch import Batch
from armillary.models.layers.documents import Documents
from armillary.models.layers.moe import MoE
from armillary.models.qwen3_moe import Qwen3MoE
from armillary.models.routing import RouterConfig
from armillary.optim.adamw import AdamW
from armillary.parallel.config import Full, NoCheckpoint, Parallel, Scale, Selective
from armillary.parallel.gradients import norms_by_name, scale_and_clip
from armillary.parallel.layout import local_tensor
from armillary.parallel.materialise import materialise
from armillary.parallel.mesh import Mesh
from armillary.parallel.model import LOSS_AXES, TOKEN_AXES
from armillary.parallel.parallelize import parallelize
from armillary.precision import Precision
from armillary.tasks.next_token import NextToken
from ranks import run_ranks

CPU = torch.device("cpu")
ROWS, LENGTH, VOCABULARY, STEPS = 8, 32, 68, 5
TOLERANCE = 1e-5
"""Relative: the order of float32 sums."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """An arrangement of ranks, and what else may change without changing the answer."""

    parallel: Parallel = field(default_factory=Parallel)
    recomputed: Any = field(default_factory=NoCheckpoint)
    microbatches: int = 1


CASES = {
    2: {
        "ep 2": Case(parallel=Parallel(dp_shard=2, ep=2)),
        "ep 2, recomputed, two microbatches": Case(
            parallel=Parallel(dp_shard=2, ep=2), recomputed=Full(), microbatches=2
        ),
        "ep 2, selective": Case(parallel=Parallel(dp_shard=2, ep=2), recomputed=Selective()),
        "fsdp 2, selective": Case(parallel=Parallel(dp_shard=2), recomputed=Selective()),
        "tp 2, expert_tp 2": Case(parallel=Parallel(tp=2, dp_shard=1, expert_tp=2)),
        "tp 2, ep 2": Case(parallel=Parallel(tp=2, dp_shard=1, ep=2)),
        "cp 2, ep 2": Case(parallel=Parallel(cp=2, dp_shard=1, ep=2)),
    },
    4: {
        "ep 4": Case(parallel=Parallel(dp_shard=4, ep=4)),
        "ep 2 x fsdp 2": Case(parallel=Parallel(dp_shard=4, ep=2)),
        "ep 2 x hsdp 2": Case(parallel=Parallel(dp_replicate=2, dp_shard=2, ep=2)),
        "tp 2 x fsdp 2, ep 2, expert_tp 2": Case(
            parallel=Parallel(tp=2, dp_shard=2, ep=2, expert_tp=2), recomputed=Full()
        ),
        "tp 2 x fsdp 2, ep 4": Case(parallel=Parallel(tp=2, dp_shard=2, ep=4)),
        "pp 2 x ep 2": Case(parallel=Parallel(pp=2, dp_shard=2, ep=2), microbatches=2),
    },
}


@dataclass(frozen=True)
class Trace:
    """What must not depend on the arrangement."""

    losses: list[float]
    norms: list[dict[str, float]]
    counts: list[dict[str, list[int]]]
    biases: dict[str, Tensor]


def config() -> Qwen3MoE:
    """Two layers of eight experts that are balanced by a bias and by a loss over whole rows."""
    return Qwen3MoE(
        vocab_size=VOCABULARY,
        dim=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        n_experts=8,
        n_active=2,
        expert_dim=24,
        max_seq_len=LENGTH,
        init_std=0.2,
        router=RouterConfig(balance_rate=0.01, sequence_loss=0.01, z_loss=1e-3),
    )


def traces(world: int) -> dict[str, Trace]:
    """All cases of a world in turn."""
    return {name: trace(case) for name, case in CASES[world].items()}


def trace(case: Case) -> Trace:
    mesh = Mesh.create(case.parallel, CPU)
    with torch.device("meta"):
        plain = config().build()
    scale = Scale(
        parallel=mesh.parallel,
        precision=Precision(compute="float32"),
        activation_checkpoint=case.recomputed,
    )
    model = parallelize(plain, mesh, scale)
    materialise(model, CPU, 3)
    optimizers = AdamW(lr=3e-3).build(model)
    task, seen = NextToken(), Trace([], [], [], {})
    for step in range(STEPS):
        batches, weight = batches_of(step, mesh, case.microbatches)
        loss = mesh.sum_over(model.forward_backward(task, batches), LOSS_AXES)
        seen.losses.append(float(loss) / weight)
        seen.norms.append(norms_by_name(model))
        loads = {
            name: mesh.sum_over(module._load, TOKEN_AXES).tolist()
            for part in model.parts
            for name, module in part.named_modules()
            if isinstance(module, MoE) and module._load is not None
        }
        seen.counts.append(loads)
        scale_and_clip(model, weight, math.inf)
        optimizers.step()
        optimizers.zero_grad()
        model.end_step()
    for name, tensor in model.state_dict().items():
        if name.endswith("expert_bias"):
            seen.biases[name] = local_tensor(tensor).clone()
    return seen


def batches_of(step: int, mesh: Mesh, microbatches: int) -> tuple[list[Batch], int]:
    """This rank's microbatches of packed documents, with ragged masks, and the step's weight."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels = tokens.roll(-1, 1)
    for row in range(ROWS):
        labels[row, LENGTH - row - 1 :] = -100
    own = ROWS // mesh.data_size // microbatches
    found = []
    for index in range(microbatches):
        first = (mesh.data_rank * microbatches + index) * own
        rows = slice(first, first + own)
        documents = Documents.from_lengths([(5 + r, LENGTH - 5 - r) for r in range(ROWS)][rows])
        found.append(Batch(tokens[rows], labels[rows], documents, tuple(range(ROWS)[rows])))
    return found, int((labels != -100).sum())


@cache
def oracle() -> Trace:
    return trace(Case(microbatches=1))


@cache
def seen(world: int) -> list[dict[str, Trace]]:
    return run_ranks(traces, world, world)


PAIRS = [(world, name) for world, cases in CASES.items() for name in cases]


@pytest.mark.parametrize(("world", "name"), PAIRS, ids=[name for _, name in PAIRS])
def test_a_decoder_trains_alike_wherever_its_experts_are(world: int, name: str) -> None:
    expected = oracle()
    found = [of_rank[name] for of_rank in seen(world)]
    for ours in found:
        assert ours.losses == pytest.approx(expected.losses, rel=TOLERANCE)
        for norms, theirs in zip(ours.norms, expected.norms, strict=True):
            assert norms == pytest.approx(theirs, rel=TOLERANCE), "gradient norms"
        for counts, all_counts in zip(ours.counts, expected.counts, strict=True):
            assert counts and counts.items() <= all_counts.items()
        for layer, bias in ours.biases.items():
            assert torch.equal(bias, expected.biases[layer])
    layers = {layer for ours in found for layer in ours.counts[0]}
    assert layers == expected.counts[0].keys(), "some layer is on no rank"
    assert all(bias.abs().max() > 0 for bias in expected.biases.values())
