"""The mesh: named axes over the ranks."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from armillary.foundation.errors import UserError
from armillary.parallel import process
from armillary.parallel.collectives import Gathering
from armillary.parallel.config import Parallel
from armillary.parallel.grid import AXES, DENSE_VIEW, EXPERT_VIEW, Grid
from armillary.parallel.groups import group_of


@dataclass(frozen=True, eq=False, kw_only=True)
class Mesh:
    """Which group, which rank, how many. A mesh of one rank is a mesh, without a process group."""

    parallel: Parallel
    """The arrangement, with every degree resolved."""
    device: torch.device
    """Where this rank computes."""
    rank: int = 0
    """This rank, counted over the whole run."""
    groups: Mapping[str, ProcessGroup] = field(default_factory=dict)
    """Groups of this rank by axis; none for axes of one rank, nor without a process group."""
    dense_view: DeviceMesh | None = None
    """Axes `DENSE_VIEW` as torch knows them, for weights outside experts. tp stands before fsdp, so
    that what tp has cut is cut by fsdp next; None without a process group."""
    expert_view: DeviceMesh | None = None
    """Axes `EXPERT_VIEW`, for weights of experts; None without a process group."""

    @classmethod
    def create(cls, parallel: Parallel, device: torch.device) -> Mesh:
        """Arranges all ranks of the process group; to be called by all of them together.

        Raises:
            UserError: the degrees do not fit the number of ranks; every rank raises the same.
        """
        if problems := parallel.problems(process.world_size()):
            raise UserError(problems)
        resolved = parallel.resolve(process.world_size())
        if not dist.is_initialized():
            assert process.world_size() == 1, "a run of many ranks joins its process group first"
            return cls(parallel=resolved, device=device)
        grid = resolved.grid
        groups = {axis: group_of(grid, axis) for axis in AXES if grid.degree(axis) > 1}
        return cls(
            parallel=resolved,
            device=device,
            rank=process.rank(),
            groups=groups,
            dense_view=_view(grid, DENSE_VIEW, groups, device.type),
            expert_view=_view(grid, EXPERT_VIEW, groups, device.type),
        )

    @classmethod
    def imagined(cls, parallel: Parallel, world_size: int, rank: int) -> Mesh:
        """The mesh as `rank` of `world_size` would see it, without groups: enough to cut a model.

        Raises:
            UserError: the degrees do not fit the number of ranks.
        """
        if problems := parallel.problems(world_size):
            raise UserError(problems)
        assert 0 <= rank < world_size, (rank, world_size)
        device = torch.device("meta")
        return cls(parallel=parallel.resolve(world_size), device=device, rank=rank)

    @functools.cached_property
    def grid(self) -> Grid:
        """Who stands where."""
        return self.parallel.grid

    @property
    def axes(self) -> dict[str, int]:
        """Degree of each axis, outermost first, then those of the experts."""
        return self.grid.axes

    def degree(self, axis: str) -> int:
        """Ranks of a group of this axis."""
        return self.grid.degree(axis)

    def coordinate(self, axis: str) -> int:
        """Place of this rank in its group of this axis, from 0."""
        return self.grid.coordinate(self.rank, axis)

    def group(self, axis: str) -> ProcessGroup | None:
        """This rank's group of an axis; None for an axis of one rank or without a process group."""
        assert axis in AXES, axis
        return self.groups.get(axis)

    @property
    def data_size(self) -> int:
        """Into how many parts the rows of each batch are dealt."""
        return self.grid.data_size

    @property
    def data_rank(self) -> int:
        """Which part of each batch is this rank's."""
        return self.grid.data_rank(self.rank)

    @property
    def is_main(self) -> bool:
        """Whether this is the one rank that speaks."""
        return self.rank == 0

    def sum_over(self, tensor: Tensor, axes: Sequence[str]) -> Tensor:
        """The sum of a small tensor over the ranks that differ in these axes; a new tensor.

        The same bits on every rank, whatever way the backend reduces: floats are exchanged, and
        added up by each rank alike.
        """
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        for axis in sorted(axes, key=AXES.index, reverse=True):
            if (group := self.group(axis)) is None:
                continue
            if total.is_floating_point():
                parts = Gathering(total[None], 0, str(group.group_name)).wait()  # [R, ...]
                total = parts.sum(0)
            else:  # exact in any order
                dist.all_reduce(total, group=group)
        return total

    def largest(self, number: Tensor) -> Tensor:
        """The largest of a scalar over all ranks; a new tensor. Nothing waits for the device."""
        result = number.detach().clone()
        if self.dense_view is not None:
            dist.all_reduce(result, op=dist.ReduceOp.MAX)
        return result


def _view(
    grid: Grid, axes: tuple[str, ...], groups: Mapping[str, ProcessGroup], device_type: str
) -> DeviceMesh:
    """The ranks with these axes as dims, in this order, whatever their order in rank numbers."""
    # A dim of one rank needs a group too, which is this rank alone, whatever the axis.
    own = [groups[axis] if axis in groups else group_of(grid, axis) for axis in axes]
    with torch.device("cpu"):
        ranks = torch.arange(grid.world_size, dtype=torch.int)
    if axes == DENSE_VIEW:  # rank numbers run over fsdp before tp
        shape = [grid.degree(axis) for axis in ("pp", "dp_replicate", "fsdp", "tp")]
        ranks = ranks.view(shape).transpose(2, 3)
    else:
        shape = [grid.degree(axis) for axis in ("pp", "dp_replicate", "expert_fsdp", "ep")]
        ranks = ranks.view([*shape, grid.expert_tp]).permute(0, 1, 3, 4, 2)
    return DeviceMesh.from_group(own, device_type, ranks.contiguous(), mesh_dim_names=axes)
