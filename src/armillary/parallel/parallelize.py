"""Scale, applied from outside: a short list of passes over a plain model."""

from __future__ import annotations

from functools import partial

from torch import nn

from armillary.parallel.activation_checkpoint import (
    checkpoint_activations,
    offload_activations,
)
from armillary.parallel.collectives import group_name, maximum
from armillary.parallel.compile import compile_blocks
from armillary.parallel.config import Scale
from armillary.parallel.context.context_parallel import split_context
from armillary.parallel.data_sharding import float8_gather, shard_over_data
from armillary.parallel.execution import InTurn
from armillary.parallel.experts.expert_parallel import split_experts
from armillary.parallel.layout import Layouts
from armillary.parallel.mesh import Mesh
from armillary.parallel.model import Executor, ParallelModel, WholeModel
from armillary.parallel.pipeline.execution import Pipelined
from armillary.parallel.pipeline.split import split_pipeline
from armillary.parallel.pipeline.tied import counted_elsewhere, tied_gradient_hook
from armillary.parallel.tensor.tensor_parallel import split_tensors
from armillary.precision.compute import set_compute_dtype
from armillary.precision.low_precision import Report, convert_linears


def parallelize(model: nn.Module, mesh: Mesh, scale: Scale) -> ParallelModel:
    """Applies the passes to a model that was built on `meta`, which is used up, in this order:

    1. precision: the format of the residual stream
    2. pipeline: from here on a part of the model is all that this rank sees, by its full names
    3. experts, then tensors and the sequence between them: weights are cut
    4. context: attention over tokens of other ranks
    5. low precision: products of the parts of matrices that are here
    6. activation checkpointing: wraps what the passes before it have rewritten
    7. compilation, per block: sees the checkpointed block, not the sharding hooks
    8. data sharding: last, so that it shards what is left

    `materialise` comes next, and only then are there optimizers.
    """
    dtype = scale.precision.compute_dtype
    whole = WholeModel.of(model)
    layouts = Layouts.of(model)
    set_compute_dtype(model, dtype)
    parts = split_pipeline(model, mesh, layouts)
    conversions = []
    gathers = []
    for part in parts:
        split_experts(part, mesh, layouts)
        split_tensors(part, mesh, layouts)
        split_context(part, mesh)
        conversions.append(_convert(part, mesh, scale))
        checkpoint_activations(part, scale.activation_checkpoint)
        compile_blocks(part, scale.compile, memory_budget=scale.activation_checkpoint.memory_budget)
        offload_activations(part, scale.activation_checkpoint)
        shard_over_data(part, mesh, layouts, dtype)
        gathers.append(float8_gather(part, mesh, dtype))
    hook = tied_gradient_hook(parts, mesh)
    return ParallelModel(
        parts,
        layouts=layouts,
        mesh=mesh,
        whole=whole,
        executor=_executor(parts, mesh),
        before_use=[each.agree for each in gathers if each is not None],
        gradient_hooks=[] if hook is None else [hook],
        counted_elsewhere=counted_elsewhere(parts, mesh),
        conversions=conversions,
    )


def _convert(part: nn.Module, mesh: Mesh, scale: Scale) -> Report:
    """Low precision; scales of a matrix that tp ranks share are those of the whole matrix."""
    name = group_name(mesh.group("tp"))
    agree = None if name is None else partial(maximum, group=name)
    return convert_linears(part, scale.precision.linears, device=mesh.device, maximum=agree)


def _executor(parts: list[nn.Module], mesh: Mesh) -> Executor:
    if mesh.degree("pp") > 1:
        return Pipelined(parts, mesh)
    (model,) = parts
    return InTurn(model, mesh)
