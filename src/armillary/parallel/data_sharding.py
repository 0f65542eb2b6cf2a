"""The pass that splits data, and with it what a rank holds of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from armillary.models.layers.linear import Linear
from armillary.parallel.blocks import blocks_of, modules_around_blocks, tied_parameters
from armillary.parallel.layout import Layouts, View, kept_tensor
from armillary.parallel.mesh import Mesh
from armillary.precision.float8_weights import Float8Gather
from armillary.precision.products import LowPrecisionProduct

DATA_AXIS: dict[View, str] = {"dense": "fsdp", "expert": "expert_fsdp"}
"""The axis over which parameters of each view are sharded."""


def shard_over_data(
    part: nn.Module, mesh: Mesh, layouts: Layouts, compute_dtype: torch.dtype
) -> None:
    """Shards what the passes before left of every parameter, one unit per block.

    In place; last in order. Sharded over `fsdp` (dp_shard and cp together), copied over
    `dp_replicate`: FSDP, HSDP and, with shards of one rank, DDP are one mechanism. Experts that an
    earlier pass arranged by themselves are a unit of their own within the block, over
    `expert_fsdp`. Gradients come out as float32 sums over all ranks, never means: they are divided
    once, by the weight of the whole step. Names of parameters do not change. Without a process
    group there is nothing to do.

    Args:
        part: the model, or the part of it that one pipeline stage holds.
        mesh: the ranks.
        layouts: where the cuts are recorded.
        compute_dtype: in which the weights of blocks are gathered.
    """
    if mesh.dense_view is None or mesh.expert_view is None:
        return
    sharding = _Sharding(mesh, compute_dtype)
    experts = {id(block): _expert_modules(block, part, layouts) for block in blocks_of(part)}
    for inside in _expert_modules(part, part, layouts):
        sharding.apply(inside, "expert", reshard=sharding.frees("expert"))
    for block in blocks_of(part):
        sharding.apply(block, "dense", reshard=sharding.frees("dense"))
    if not tied_parameters(part):
        before, after = modules_around_blocks(part)
        # Weights outside the blocks are gathered in float32 and cast where they are used, as in one
        # process, so that their gradients are float32: an embedding's adds up one row per token,
        # and in bfloat16 frequent tokens would stop learning; the head's comes from the loss so.
        for module in before:
            sharding.apply(module, "dense", reshard=sharding.frees("dense"), masters=True)
        if after:
            # Needed again at once in the backward pass, so they are not freed in between.
            sharding.apply(after, "dense", reshard=False, masters=True)
    # The root takes what is left: nothing, or the weights that first and last module share.
    sharding.apply(part, "dense", reshard=False, masters=True)
    for unit in _units(part):
        # Plain sums: gloo has no premultiplied ones, which a divisor of 1 would otherwise become.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    _record(part, layouts)
    prefetch = _Prefetch(blocks_of(part), experts, mesh.parallel.prefetch)
    part.register_forward_pre_hook(prefetch.before_forward)
    part.register_forward_hook(_free_what_no_backward_will)


def float8_gather(part: nn.Module, mesh: Mesh, compute_dtype: torch.dtype) -> Float8Gather | None:
    """The weights of a sharded part that travel in 8 bits, or None; to `agree` before each use.

    Where shards are of one rank nothing travels, and the products round weights by themselves.
    """
    modules = [
        module
        for module in part.modules()
        if isinstance(module, Linear)
        and isinstance(module.product, LowPrecisionProduct)
        and module.product.float8_all_gather
    ]
    if mesh.degree("fsdp") == 1 or not modules:
        return None
    assert not mesh.parallel.cpu_offload, "a recipe that has both is refused"

    def maximum(x: Tensor) -> Tensor:
        for axis in ("fsdp", "tp"):  # ranks of tp that hold the same weight agree already
            if (group := mesh.group(axis)) is not None:
                dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
        return x

    return Float8Gather(modules, local=kept_tensor, maximum=maximum, dtype=compute_dtype)


def set_accumulation(part: nn.Module, mesh: Mesh, *, last: bool) -> None:
    """Says, before a microbatch, whether it is the last one of its step.

    Between copies gradients are summed after the last one only. Between shards as well, unless
    `parallel.sync_every_microbatch` asks for less memory.
    """
    if not isinstance(part, FSDPModule):
        return
    is_split = mesh.degree("fsdp") > 1
    sync = last or (is_split and mesh.parallel.sync_every_microbatch)
    part.set_requires_gradient_sync(sync)
    part.set_requires_all_reduce(last)
    part.set_is_last_backward(last)


@dataclass(frozen=True, slots=True)
class _Sharding:
    """How units are made."""

    mesh: Mesh
    compute_dtype: torch.dtype

    def frees(self, view: View) -> bool:
        """Whether gathered weights are freed after the forward pass.

        A copy has nothing to free but the cast weights, which one process keeps for backward too.
        """
        return self.mesh.parallel.reshard_after_forward and self._degree(view) > 1

    def apply(
        self,
        modules: nn.Module | Sequence[nn.Module],
        view: View,
        *,
        reshard: bool,
        masters: bool = False,
    ) -> None:
        """Makes one unit of what is in the modules and in no unit yet."""
        fully_shard(
            modules if isinstance(modules, nn.Module) else list(modules),
            mesh=self._device_mesh(view),
            mp_policy=MixedPrecisionPolicy(
                param_dtype=None
                if masters or self.compute_dtype == torch.float32
                else self.compute_dtype,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,  # the residual stream has its format, tables theirs
            ),
            offload_policy=self._offload(),
            reshard_after_forward=reshard,
            shard_placement_fn=self._placement(view),
        )

    def _device_mesh(self, view: View) -> DeviceMesh:
        whole = self.mesh.dense_view if view == "dense" else self.mesh.expert_view
        assert whole is not None
        if self.mesh.degree("dp_replicate") == 1:
            return whole[DATA_AXIS[view]]
        return whole["dp_replicate", DATA_AXIS[view]]

    def _degree(self, view: View) -> int:
        return self.mesh.degree(DATA_AXIS[view])

    def _offload(self) -> OffloadPolicy:
        if not self.mesh.parallel.cpu_offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.mesh.device.type == "cuda")

    def _placement(self, view: View) -> Any:
        def place(parameter: nn.Parameter) -> Shard:
            return Shard(data_dim(tuple(parameter.shape), view, self._degree(view)))

        return place


def data_dim(shape: tuple[int, ...], view: View, degree: int) -> int:
    """Along which dim a parameter is sharded, of which earlier passes left this shape.

    Stacks of fewer matrices than ranks are cut along the rows of the matrices.
    """
    least_dims = 2 if view == "expert" else 3  # an expert's bias is a row of a stack
    stacked = len(shape) >= least_dims and shape[0] < degree and shape[1] % degree == 0
    return 1 if stacked else 0


def _expert_modules(within: nn.Module, part: nn.Module, layouts: Layouts) -> list[nn.Module]:
    """Modules inside `within` whose own parameters are arranged as experts."""
    inside = {id(module) for module in within.modules()}
    return [
        module
        for prefix, module in part.named_modules()
        if id(module) in inside and _is_expert(prefix, module, layouts)
    ]


def _is_expert(prefix: str, module: nn.Module, layouts: Layouts) -> bool:
    names = [name for name, _ in module.named_parameters(recurse=False)]
    views = {layouts.layout(f"{prefix}.{name}" if prefix else name).view for name in names}
    assert len(views) < 2, f"{prefix} holds parameters of experts and others"
    return views == {"expert"}


class _Prefetch:
    """What each block has gathered while it computes: its own experts, then the next blocks.

    In training only. Elsewhere a block may be left out, and weights that were gathered for it would
    wait there, and be taken for those of a later step.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], experts: dict[int, list[nn.Module]], ahead: int
    ) -> None:
        """Of the blocks of a part, in order, `ahead` of them at a time."""
        self._blocks = list(_sharded(blocks))
        self._experts = [list(_sharded(experts[id(block)])) for block in blocks]
        self._ahead = ahead
        self._active = False

    def before_forward(self, part: nn.Module, args: object) -> None:
        """To be called before each forward pass of the part."""
        active = self._ahead > 0 and part.training and torch.is_grad_enabled()
        if active == self._active:
            return
        self._active = active
        for index, block in enumerate(self._blocks):
            own = self._experts[index]
            after = self._blocks[index + 1 : index + 1 + self._ahead]
            before = self._blocks[max(0, index - self._ahead) : index][::-1]
            block.set_modules_to_forward_prefetch([*own, *after] if active else [])
            block.set_modules_to_backward_prefetch([*own, *before] if active else [])


def _sharded(modules: Any) -> Iterator[FSDPModule]:
    for module in modules:
        assert isinstance(module, FSDPModule)
        yield module


def _record(part: nn.Module, layouts: Layouts) -> None:
    """Notes along which dim each parameter was sharded."""
    for name, parameter in part.named_parameters(remove_duplicate=False):
        assert isinstance(parameter, DTensor), f"{name} is in no unit"
        (dim,) = (each.dim for each in parameter.placements if isinstance(each, Shard))
        layouts.split(name, DATA_AXIS[layouts.layout(name).view], dim)


def _units(part: nn.Module) -> list[FSDPModule]:
    return [module for module in part.modules() if isinstance(module, FSDPModule)]


def _free_what_no_backward_will(part: nn.Module, args: object, output: object) -> None:
    """After a forward without gradients, puts the shards back in the units that kept whole weights.

    The backward pass would do so; without it, the model would go on showing whole weights to
    whoever saves, loads or updates its parameters.
    """
    if not torch.is_grad_enabled():
        for unit in _units(part):
            unit.reshard()
