"""The one place that speaks to torch.distributed.pipelining.

What passes through torch's schedules are numbers of microbatches; what a microbatch is, each part
knows: every schedule runs the forward passes of a stage by ascending microbatch. Shapes are told
beforehand, so that no rank negotiates them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _PipelineScheduleRuntime,  # private: nothing public reads a schedule from a file
    get_schedule_class,
)

from armillary.foundation.errors import Problem, UserError
from armillary.parallel.mesh import Mesh
from armillary.parallel.pipeline.stage import stage_of
from armillary.parallel.schedules import is_file


class Schedule(Protocol):
    """A schedule of torch with its stages, for one number and shape of microbatches."""

    def step(
        self,
        *args: Tensor,
        target: Tensor | None = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
    ) -> Any:
        """Forward and backward over all microbatches, cut from dim 0 of all tensors."""


def build_schedule(
    parts: Sequence[nn.Module], mesh: Mesh, *, microbatches: int, rows: int, length: int
) -> Schedule:
    """A schedule that calls the parts of this rank with the residual stream alone.

    Args:
        parts: stages of this rank; the last stage of all returns its loss, a sum.
        mesh: where.
        microbatches: how many a step has.
        rows: of a microbatch.
        length: tokens of the residual stream that a row has on this rank.

    Raises:
        UserError: the schedule cannot be run with so many microbatches.
    """
    stages = [_stage(part, mesh, rows, length) for part in parts]
    name = mesh.parallel.schedule
    try:
        if is_file(name):
            return _from_file(name, stages, microbatches)
        # Losses are sums, so gradients are not divided by the number of microbatches.
        kind: Any = get_schedule_class(name)
        single = issubclass(kind, PipelineScheduleSingle)
        schedule: Schedule = kind(
            stages[0] if single else stages, microbatches, loss_fn=_loss, scale_grads=False
        )
        return schedule
    except (ValueError, AssertionError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            Problem(
                f"parallel.schedule = {name} cannot be run with {microbatches} microbatches: "
                f"{reason}",
                allowed="another schedule, or another number of microbatches",
                fix="--parallel.schedule GPipe",
            )
        ) from error


def run_schedule(schedule: Schedule, microbatches: int) -> list[Tensor]:
    """One step; returns the loss of each microbatch on the rank of the last stage, else nothing."""
    numbers = torch.arange(microbatches)  # what the first stage is called with, and ignores
    losses: list[Tensor] = []
    schedule.step(numbers, target=numbers, losses=losses, return_outputs=False)
    return [loss.detach() for loss in losses]


def _from_file(path: str, stages: list[PipelineStage], microbatches: int) -> Schedule:
    kind: Any = _PipelineScheduleRuntime
    runtime = kind(stages, microbatches, loss_fn=_loss, scale_grads=False)
    runtime._load_csv(str(Path(path).expanduser()), format="compute_only")
    schedule: Schedule = runtime
    return schedule


def _stage(part: nn.Module, mesh: Mesh, rows: int, length: int) -> PipelineStage:
    stage = stage_of(part)
    number = torch.zeros(1, dtype=torch.int64, device="meta")
    shape = (rows, length, stage.width)
    hidden = torch.empty(shape, dtype=stage.dtype, device="meta", requires_grad=True)
    loss = torch.zeros((), device="meta", requires_grad=True)
    return _Stage(
        part,
        stage.index,
        len(stage.ranks),
        mesh.device,
        input_args=(number if stage.is_first else hidden,),
        output_args=(loss if stage.is_last else hidden,),
        group=mesh.group("pp"),
    )


class _Stage(PipelineStage):
    """A stage whose gradients add up in float32 over microbatches, however they are computed.

    Data sharding moves the gradient of each backward pass, which has the format of computation,
    to a sum in float32. A pass for weights alone has none of the hooks that make it do so: without
    this, gradients of the weight passes that follow each other would add up in bfloat16.
    """

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """See the base class."""
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        for unit in self.submod.modules():
            if isinstance(unit, FSDPModule):
                for parameter in sharded_parameters(unit):
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()


def sharded_parameters(unit: FSDPModule) -> list[Any]:
    """What data sharding knows of each parameter of one unit; private to torch."""
    state: Any = fully_shard.state(unit)  # type: ignore[attr-defined]
    groups = getattr(state, "_fsdp_param_groups", None)  # one, and another name, in torch 2.11
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return [parameter for group in groups for parameter in group.fsdp_params]


def _loss(output: Tensor, target: Tensor) -> Tensor:
    """The last stage has computed its loss already."""
    return output
