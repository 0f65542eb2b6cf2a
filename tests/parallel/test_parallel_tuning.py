"""Frozen weights and low-rank factors on arrangements of 4 ranks against one process."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_cases import LENGTH, VOCABULARY, batches, tiny, tiny_experts, wholes
from torch import Tensor

from armillary.models.config import ModelConfig
from armillary.models.deepseek import DeepSeek
from armillary.models.gpt_oss import GptOss
from armillary.models.tuning.config import Full, LoRA, TuningConfig
from armillary.optim.adamw import AdamW
from armillary.parallel import Scale
from armillary.parallel.activation_checkpoint_config import Selective
from armillary.parallel.config import Parallel
from armillary.parallel.gradients import scale_and_clip
from armillary.parallel.layout import local_tensor
from armillary.parallel.materialise import materialise
from armillary.parallel.mesh import Mesh
from armillary.parallel.model import LOSS_AXES, ParallelModel
from armillary.parallel.parallelize import parallelize
from armillary.precision.config import Precision
from armillary.precision.low_precision_config import (
    Float8Tensorwise,
    LowPrecisionConfig,
    NoLowPrecision,
)
from armillary.tasks.next_token import NextToken
from ranks import run_ranks

LIMIT = 1e-5
STEPS = 3
DEVICE = torch.device("cpu")

DENSE, DEEP = tiny(), replace(tiny(), n_layers=4)
MIXTURE = replace(tiny_experts(), n_shared_experts=1)
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "dim": 24, "n_layers": 2, "n_heads": 4, "expert_dim": 20,
    "ffn_dim": 36, "max_seq_len": LENGTH, "n_experts": 4, "n_active": 2, "init_std": 0.1,
}  # fmt: skip
LATENT = DeepSeek(
    **_SIZES, query_rank=12, key_value_rank=8, plain_head_dim=6, rope_head_dim=4, value_head_dim=6,
    n_kv_heads=4, predict_ahead=True,
)  # fmt: skip
WIDE = replace(tiny(), dim=32, n_kv_heads=4, head_dim=16, ffn_dim=64)
SINKS = GptOss(**_SIZES, n_kv_heads=2, head_dim=6, window=5, rope_scaling=None)

LORA = LoRA(rank=2, alpha=4)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, what is trained of it, and an arrangement."""

    parallel: Parallel
    model: ModelConfig = field(default_factory=lambda: DENSE)
    tuning: TuningConfig = LORA
    microbatches: int = 1
    steps: int = STEPS
    checkpointed: bool = False
    linears: LowPrecisionConfig = field(default_factory=NoLowPrecision)
    full: bool = False
    """Whether it runs with `--full` only."""


def _mesh(**leaves: object) -> Parallel:
    return Parallel(**({"dp_shard": 1} | leaves))  # type: ignore[arg-type]


PIPELINE = _mesh(pp=2, dp_shard=2)
CASES = {
    "fsdp2 x tp2": Case(parallel=_mesh(dp_shard=2, tp=2), steps=20),
    "fsdp4": Case(parallel=_mesh(dp_shard=4), checkpointed=True, full=True),
    "copies of tp2, overlapped": Case(
        parallel=_mesh(dp_replicate=2, tp=2, asynchronous_tp=True), checkpointed=True, full=True
    ),
    "overlapped frozen": Case(
        parallel=_mesh(dp_shard=2, tp=2, asynchronous_tp=True),
        tuning=Full(frozen=("*.query.weight", "*.key.weight", "*.value.weight", "*.down.weight")),
    ),
    "context": Case(parallel=_mesh(cp=2, dp_shard=2), full=True),
    "pipeline, tied head": Case(
        parallel=PIPELINE, microbatches=2, model=tiny(tied=True), full=True
    ),
    "pipeline, tied head trained": Case(
        parallel=PIPELINE,
        microbatches=2,
        model=tiny(tied=True),
        tuning=replace(LORA, trained=("embedding.weight", "*norm.weight")),
    ),
    "pipeline, first stage frozen": Case(
        parallel=PIPELINE,
        microbatches=2,
        tuning=Full(frozen=("embedding.weight", "layers.0.*")),
    ),
    "pipeline, last stage frozen": Case(
        parallel=PIPELINE,
        microbatches=2,
        tuning=Full(frozen=("layers.1.*", "norm.weight", "head.weight")),
        full=True,
    ),
    "split backward": Case(
        parallel=_mesh(pp=2, dp_shard=2, stages_per_rank=2, schedule="InterleavedZeroBubble"),
        model=DEEP,
        microbatches=2,
        full=True,
    ),
    "experts": Case(parallel=_mesh(dp_shard=4, ep=2), model=MIXTURE, full=True),
    "cut experts and tp": Case(parallel=_mesh(dp_shard=2, tp=2, ep=2, expert_tp=2), model=MIXTURE),
    "latent": Case(parallel=_mesh(dp_shard=2, tp=2, ep=2), model=LATENT, full=True),
    "sinks": Case(parallel=_mesh(dp_shard=2, tp=2, ep=4), model=SINKS, full=True),
    "float8": Case(
        parallel=_mesh(dp_shard=2, tp=2),
        model=WIDE,
        linears=Float8Tensorwise(emulate="always", float8_all_gather=True),
        full=True,
    ),
}


@dataclass(frozen=True)
class Trace:
    """What must not depend on the arrangement."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def trace(case: Case, mesh: Mesh) -> Trace:
    """Some steps of AdamW, with the checks that need no other run."""
    with torch.device("meta"):
        model = case.model.build()
    case.tuning.apply(model)
    precision = Precision(compute="float32", linears=case.linears)
    scale = Scale(parallel=mesh.parallel, precision=precision)
    if case.checkpointed:
        scale = replace(scale, activation_checkpoint=Selective())
    parallel = parallelize(model, mesh, scale)
    materialise(parallel, DEVICE, seed=3)
    _randomise_second_factors(parallel)
    frozen = {
        name: local_tensor(parameter).clone()
        for name, parameter in parallel.named_parameters()
        if not parameter.requires_grad
    }
    assert frozen.keys() <= parallel.whole.frozen
    if case.model.tied_embeddings:
        is_trained = any("embedding.weight" in each for each in getattr(case.tuning, "trained", ()))
        assert ("embedding.weight" in parallel.whole.frozen) != is_trained
    optimizers = AdamW(lr=2e-3).build(parallel)
    losses, norms = [], []
    microbatches, weight = batches(parallel, case.microbatches)
    weights = torch.tensor([NextToken().weights(batch) for batch in microbatches]).sum(0)
    data_axes = ("dp_replicate", "dp_shard")
    task = NextToken().within(tuple(int(w) for w in mesh.sum_over(weights, data_axes)))
    for _ in range(case.steps):
        optimizers.zero_grad()
        loss = parallel.forward_backward(task, microbatches)
        losses.append(float(mesh.sum_over(loss, LOSS_AXES)) / weight)
        norms.append(float(scale_and_clip(parallel, weight, math.inf)))
        optimizers.step()
        parallel.end_step()
    for name, parameter in parallel.named_parameters():
        assert (name in frozen) == (parameter.grad is None), name
        if name in frozen:
            assert torch.equal(local_tensor(parameter), frozen[name]), name
    with_state = [p for optimizer in optimizers.optimizers for p in optimizer.state]
    assert all(parameter.requires_grad for parameter in with_state)
    trained = {n: p.detach() for n, p in parallel.named_parameters() if p.requires_grad}
    return Trace(losses, norms, wholes(parallel, trained))


def _randomise_second_factors(model: ParallelModel) -> None:
    """B of values other than 0, so that A has gradients from the first step on."""
    parameters = dict(model.named_parameters())
    for index, (name, shape) in enumerate(model.whole.shapes.items()):
        if name.endswith("lora_b"):
            generator = torch.Generator().manual_seed(index)
            value = 0.1 * torch.randn(shape, generator=generator)
            if name in parameters:
                local_tensor(parameters[name]).detach().copy_(model.own_part(name, value))


def deviations(names: list[str]) -> dict[str, tuple[float, float, float]]:
    """By case, the largest relative deviations of losses, gradient norms and trained weights."""
    torch.set_num_threads(1)
    found = {}
    for name in names:
        case = CASES[name]
        own = trace(case, Mesh.create(case.parallel, DEVICE))
        if dist.get_rank() != 0:
            continue
        alone = Mesh(parallel=Parallel().resolve(1), device=DEVICE)
        oracle = trace(replace(case, microbatches=1, checkpointed=False), alone)
        assert own.weights.keys() == oracle.weights.keys(), name
        found[name] = (
            relative(torch.tensor(own.losses), torch.tensor(oracle.losses)),
            relative(torch.tensor(own.norms), torch.tensor(oracle.norms)),
            max(relative(own.weights[each], weight) for each, weight in oracle.weights.items()),
        )
    return found


def relative(one: Tensor, other: Tensor) -> float:
    """Largest difference as a share of the largest expected value."""
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.full)])
def test_tuned_models_train_alike_on_every_mesh_and_frozen_weights_stay(full: bool) -> None:
    names = [name for name, case in CASES.items() if case.full == full]
    found = run_ranks(deviations, 4, names, timeout=240)[0]
    print(*found.items(), sep="\n")
    for name, (loss, norm, weights) in found.items():
        assert loss <= LIMIT, (name, found[name])
        assert norm <= LIMIT, (name, found[name])
        # Adam's first steps are signs of gradients, of which some are as small as rounding.
        assert weights <= 1e-4, (name, found[name])
