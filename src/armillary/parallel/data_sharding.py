"""The pass that splits data, and with it what a rank holds of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from armillary.parallel.blocks import blocks_of, modules_outside_blocks, tied_parameters
from armillary.parallel.mesh import Mesh


def shard_over_data(model: nn.Module, mesh: Mesh, compute_dtype: torch.dtype) -> None:
    """Shards every parameter that no earlier pass claimed, one unit per block.

    In place; last in order. Sharded over `dp_shard`, copied over `dp_replicate`: FSDP, HSDP and,
    with shards of one rank, DDP are one mechanism. Gradients come out as float32 sums over all
    ranks, never means: the loss is divided by the weight of the whole step before. Names of
    parameters do not change. Without a process group there is nothing to do.
    """
    if mesh.device_mesh is None:
        return
    in_compute = _policy(compute_dtype)
    in_masters = _policy(torch.float32)
    options: dict[str, Any] = {"mesh": mesh.device_mesh}
    if mesh.axes["dp_replicate"] == 1:
        options["mesh"] = mesh.device_mesh["dp_shard"]
    # A copy has nothing to free but the cast weights, which one process keeps for backward too.
    reshard = mesh.parallel.reshard_after_forward and mesh.axes["dp_shard"] > 1

    for block in blocks_of(model):
        fully_shard(block, mp_policy=in_compute, reshard_after_forward=reshard, **options)
    if not tied_parameters(model):
        first, *rest = modules_outside_blocks(model)
        # Weights outside the blocks are gathered in float32 and cast where they are used, as in one
        # process, so that their gradients are float32: an embedding's adds up one row per token,
        # and in bfloat16 frequent tokens would stop learning; the head's comes from the loss so.
        fully_shard(first, mp_policy=in_masters, reshard_after_forward=reshard, **options)
        if rest:
            # Needed again at once in the backward pass, so they are not freed in between.
            fully_shard(rest, mp_policy=in_masters, reshard_after_forward=False, **options)
    # The root takes what is left: nothing, or the weights that first and last module share.
    fully_shard(model, mp_policy=in_masters, reshard_after_forward=False, **options)
    for unit in _units(model):
        # Plain sums: gloo has no premultiplied ones, which a divisor of 1 would otherwise become.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    model.register_forward_hook(_free_what_no_backward_will)


def set_accumulation(model: nn.Module, mesh: Mesh, *, last: bool) -> None:
    """Says, before a microbatch, whether it is the last one of its step.

    Between copies gradients are summed after the last one only. Between shards as well, unless
    `parallel.sync_every_microbatch` asks for less memory.
    """
    if not isinstance(model, FSDPModule):
        return
    is_split = mesh.axes["dp_shard"] > 1
    sync = last or (is_split and mesh.parallel.sync_every_microbatch)
    model.set_requires_gradient_sync(sync)
    model.set_requires_all_reduce(last)
    model.set_is_last_backward(last)


def _policy(compute_dtype: torch.dtype) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # the residual stream has its format, rotation tables theirs
    )


def _units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _free_what_no_backward_will(model: nn.Module, args: object, output: object) -> None:
    """After a forward without gradients, puts the shards back in the units that kept whole weights.

    The backward pass would do so; without it, the model would go on showing whole weights to
    whoever saves, loads or updates its parameters.
    """
    if not torch.is_grad_enabled():
        for unit in _units(model):
            unit.reshard()
