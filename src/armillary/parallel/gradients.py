"""The gradient of a step: its norm, one number on every mesh, and its one division.

Every element of every gradient is counted by one rank: of those that hold copies of a part, the
first. Squares, or other powers, are added in float64 and summed over all ranks at once, whatever
the axes. Nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.parallel.layout import counts_here, local_tensor
from armillary.parallel.model import ParallelModel

GROUPS = ("embedding", "attention", "feed_forward", "experts", "router", "norms", "head", "other")
"""Kinds of parameters of which norms can be asked."""

_SAFE_ORDERS = (1.0, 2.0, math.inf)

_PIECE = 1 << 18
"""Elements whose squares are added at a time."""


@torch.no_grad()
def scale_and_clip(
    model: ParallelModel, weight: float, max_norm: float, order: float = 2.0
) -> Tensor:
    """Divides all gradients by `weight`, and by what else keeps their norm at most `max_norm`.

    Args:
        model: with the gradients of a sum.
        weight: of what the sum is divided by; the same on every rank.
        max_norm: above 0; math.inf only measures.
        order: see `gradient_norms`.

    Returns:
        [] float64, the norm of the divided gradients before clipping, equal on all ranks. One that
        is not finite clips nothing, so that gradients tell which of them are at fault: look at it
        before the update.
    """
    assert max_norm > 0 and weight > 0
    norm = total_norm(gradient_norms(model, order), order) / weight
    factor = max_norm / norm.clamp(min=max_norm) if math.isfinite(max_norm) else norm.new_ones(())
    factor = torch.where(norm.isfinite(), factor, 1.0) / weight
    for same in _by_device_and_dtype(_gradients(model.parameters())):
        # Of gradients on the host the factor has to be there before it is used: no copy unwaited.
        torch._foreach_mul_(same, factor.to(same[0].device, same[0].dtype))
    return norm


def gradient_norms(model: ParallelModel, order: float = 2.0) -> Tensor:
    """Norms of the gradients by kind of parameter, `[len(GROUPS)]` float64, equal on all ranks.

    To be called by all ranks together. Parameters without a gradient count as zero.

    Args:
        model: with gradients.
        order: p of the p-norm, 1 or more; math.inf for the largest absolute value.
    """
    places = {name: GROUPS.index(kind_of(name)) for name in model.whole.shapes}
    return _norms(model, places, len(GROUPS), order)


def total_norm(norms: Tensor, order: float = 2.0) -> Tensor:
    """The norm of everything, given the norms of its kinds."""
    scale = _divisors(norms.max())
    share: Tensor = torch.linalg.vector_norm(norms / scale, order)
    return scale * share


def kind_of(name: str) -> str:
    """Which of `GROUPS` a parameter belongs to, by its name."""
    path = name.split(".")
    if any(step == "norm" or step.endswith("_norm") for step in path):
        return "norms"
    for kind in ("experts", "router", "attention", "feed_forward", "embedding", "head"):
        if kind in path:
            return kind
    return "other"


def norms_by_group(model: ParallelModel, order: float = 2.0) -> dict[str, float]:
    """Norms of the gradients by kind of parameter, of those that exist. Waits for the device.

    To be called by all ranks together.
    """
    kinds = {kind_of(name) for name in model.whole.shapes}
    norms = zip(GROUPS, gradient_norms(model, order).tolist(), strict=True)
    return {kind: norm for kind, norm in norms if kind in kinds}


def norms_by_name(model: ParallelModel, order: float = 2.0) -> dict[str, float]:
    """The norm of every parameter's gradient, of all stages, on every rank. Waits for the device.

    To be called by all ranks together. Parameters without a gradient have 0.
    """
    # One sum of a vector: of a large run, tables of names and numbers would be many megabytes.
    places = {name: index for index, name in enumerate(sorted(model.whole.shapes))}
    norms = _norms(model, places, len(places), order)
    return dict(zip(places, norms.tolist(), strict=True))


@torch.no_grad()
def _norms(model: ParallelModel, places: Mapping[str, int], size: int, order: float) -> Tensor:
    """Norms of the gradients whose names share a place, `[size]` float64, equal on all ranks."""
    assert order >= 1, order
    total = torch.zeros(size, dtype=torch.float64, device=model.mesh.device)
    # Squares of float32 numbers are float64 numbers. Higher powers need not be: they are taken of
    # shares of the largest element.
    scales = None
    if order not in _SAFE_ORDERS:
        scales = _divisors(_norms(model, places, size, math.inf))
    counted: dict[int, list[Tensor]] = {}
    for name, gradient in _counted(model):
        counted.setdefault(places[name], []).extend(_pieces(gradient))
    for place, gradients in counted.items():
        for same in _by_device_and_dtype(gradients):
            if scales is None:
                norms = torch.stack(torch._foreach_norm(same, order, dtype=torch.float64))
            else:
                scale = scales[place].to(same[0].device)
                shares = (piece.double() / scale for piece in same)  # one at a time
                norms = torch.stack([torch.linalg.vector_norm(share, order) for share in shares])
            if order == math.inf:
                largest = norms.max().nan_to_num(
                    nan=math.inf, posinf=math.inf
                )  # a maximum over ranks drops NaNs
                total[place] = torch.maximum(total[place], largest.to(total.device))
            else:
                total[place] += norms.pow(order).sum().to(total.device)
    if model.mesh.dense_view is not None:
        dist.all_reduce(total, op=dist.ReduceOp.MAX if order == math.inf else dist.ReduceOp.SUM)
    if order == math.inf:
        return total
    return total.pow(1 / order) if scales is None else scales * total.pow(1 / order)


def _divisors(largest: Tensor) -> Tensor:
    """Of largest absolute values, those by which all others can be divided; else 1."""
    return torch.where((largest > 0) & largest.isfinite(), largest, 1.0)


def _counted(model: ParallelModel) -> Iterator[tuple[str, Tensor]]:
    """What this rank counts of the gradients."""
    for name, parameter in model.counted_parameters():
        if parameter.grad is not None and counts_here(model.layouts.layout(name), model.mesh):
            gradient = local_tensor(parameter.grad)
            if gradient.numel() > 0:
                yield name, gradient


def _pieces(gradient: Tensor) -> tuple[Tensor, ...]:
    """The gradient in pieces, since a CPU makes a float64 copy of what it is given."""
    return torch.split(gradient.reshape(-1), _PIECE)


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [local_tensor(p.grad) for p in parameters if p.grad is not None]


def _by_device_and_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())
