"""Process groups of the mesh's axes, made once in a process for the same ranks."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from armillary.parallel import process
from armillary.parallel.grid import Grid


@dataclass
class _Made:
    """Groups below one default group."""

    world: ProcessGroup | None = None
    groups: dict[tuple[int, ...], ProcessGroup] = field(default_factory=dict)


_made = _Made()


def group_of(grid: Grid, axis: str) -> ProcessGroup:
    """The group of this rank on an axis. To be called by all ranks, in the same order of axes.

    Ranks of a group are evenly spaced, so a group that one rank has already, every rank has: the
    answer from memory needs no agreement.
    """
    world = dist.group.WORLD
    assert world is not None, "groups need a process group"
    if _made.world is not world:
        _made.world, _made.groups = world, {}
    members = grid.members(dist.get_rank(), axis)
    if members not in _made.groups:
        _made.groups[members] = _new(grid, axis, members, world)
    return _made.groups[members]


def forget() -> None:
    """Lets go of all groups; the default group is about to end."""
    _made.world, _made.groups = None, {}


def _new(grid: Grid, axis: str, members: tuple[int, ...], world: ProcessGroup) -> ProcessGroup:
    description = f"mesh_{axis}"
    if len(members) == grid.world_size:
        return world
    timeout = process.timeout()
    own: ProcessGroup | None = None
    if getattr(world, "bound_device_id", None) is not None:  # NCCL splits all of them at once
        parts = [list(group) for group in grid.groups(axis)]
        own = dist.split_group(
            split_ranks=parts, timeout=timeout, group_desc=description, **_of_devices_only()
        )
    elif len(members) == 1:  # nobody else has to know
        own = dist.new_group(
            list(members), timeout, use_local_synchronization=True, group_desc="mesh_alone"
        )
    else:
        for ranks in grid.groups(axis):
            group = dist.new_group(list(ranks), timeout, group_desc=description)
            own = group if ranks == members else own
    assert own is not None, "every rank is in one group of each axis"
    return own


def _of_devices_only() -> dict[str, Any]:
    """An argument by which a split takes NCCL along and leaves gloo: axes carry nothing of hosts.

    Every gloo group has a connection to each of its ranks. What hosts agree on has the default
    group, or one of its own (`checkpoint.ranks`). Older torch splits all or nothing.
    """
    known = "backend" in inspect.signature(dist.split_group).parameters
    return {"backend": "cuda:nccl"} if known else {}
