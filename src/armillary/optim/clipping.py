"""The global gradient norm and clipping by it, the same number on every mesh.

Every element of every gradient is counted once: a DTensor's squares are summed over the mesh axes
that shard it and not over those that replicate it; a plain tensor is whole on every rank. Nothing
waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

Axes = tuple[DeviceMesh, tuple[int, ...]]
"""A mesh, and those of its axes over which squares are summed."""


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The 2-norm of all gradients taken together, [] float32, equal on all ranks.

    Call it on every rank with the same parameters. Parameters without a gradient count as zero.
    """
    groups: dict[Axes | None, list[Tensor]] = {}
    for gradient in _gradients(parameters):
        local, axes = _local_squares_of(gradient)
        groups.setdefault(axes, []).append(local)
    if not groups:
        return torch.zeros(())
    total = torch.stack([_sum_of_squares(axes, locals_) for axes, locals_ in groups.items()])
    return total.sum().sqrt()


@torch.no_grad()
def clip_by_global_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scales all gradients in place so that their global norm is at most `max_norm`.

    Returns the norm before clipping. Gradients within the limit are left as they are, bit for bit;
    math.inf only measures. A norm that is not finite makes the gradients useless: the caller must
    look at the result before it updates.
    """
    assert max_norm > 0
    parameters = list(parameters)
    norm = gradient_norm(parameters)
    if math.isfinite(max_norm):
        factor = max_norm / norm.clamp(min=max_norm)  # exactly 1 within the limit
        locals_ = [_local(gradient) for gradient in _gradients(parameters)]
        for same in _by_device_and_dtype(locals_):
            torch._foreach_mul_(same, factor.to(same[0].device, non_blocking=True))
    return norm


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    seen: set[int] = set()
    gradients = []
    for parameter in parameters:
        if parameter.grad is not None and id(parameter) not in seen:  # a tied weight counts once
            seen.add(id(parameter))
            gradients.append(parameter.grad)
    return gradients


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _local_squares_of(gradient: Tensor) -> tuple[Tensor, Axes | None]:
    """This rank's part of a gradient, and the axes whose ranks hold the other parts."""
    if not isinstance(gradient, DTensor):
        return gradient, None
    if any(placement.is_partial() for placement in gradient.placements):
        gradient = gradient.redistribute(
            placements=[Replicate() if p.is_partial() else p for p in gradient.placements]
        )
    sharded = tuple(
        axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate()
    )
    return gradient.to_local(), (gradient.device_mesh, sharded) if sharded else None


def _sum_of_squares(axes: Axes | None, locals_: Sequence[Tensor]) -> Tensor:
    """[] float32, over all ranks that hold parts of these tensors."""
    norms = [
        norm
        for same in _by_device_and_dtype(locals_)
        for norm in torch._foreach_norm(same, 2, dtype=torch.float32)
    ]
    total = torch.stack([norm.to(norms[0].device) for norm in norms]).square().sum()
    if axes is not None:
        mesh, sharded = axes
        for axis in sharded:
            dist.all_reduce(total, group=mesh.get_group(axis))
    return total


def _by_device_and_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())
