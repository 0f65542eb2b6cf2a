"""From `meta` to memory: every rank fills its own shards, all of them with the same weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from armillary.models.layers.initializer import Initializer
from armillary.parallel.blocks import tied_parameters
from armillary.parallel.random_numbers import NormalStream


def materialise(model: nn.Module, device: torch.device, seed: int) -> None:
    """Gives a model built on `meta` its memory and its first weights. In place, after all passes.

    The value of an element is a function of (seed, parameter name, index in the whole parameter),
    so it does not depend on the mesh, on the order of parameters or on other parameters. A rank
    computes its shards only and never holds more of a parameter than that.
    """
    allocate(model, device)
    initializers = cast("Mapping[str, Initializer]", model.initializers())  # type: ignore[operator]  # nn.Module types it as a tensor
    for names, parameter in _named(model):
        declared = sorted(name for name in names if name in initializers)
        assert declared, f"{names[0]} has no initializer"
        _fill(parameter, initializers[declared[0]], seed, declared[0])


def allocate(model: nn.Module, device: torch.device) -> None:
    """Gives a model built on `meta` memory whose content is undefined; tied weights stay tied."""
    ties = tied_parameters(model)
    buffers = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    assert not buffers, f"buffers {buffers} would be undefined: compute them in forward instead"
    model.to_empty(device=device)
    for (owner, name), *others in ties:
        for module, other_name in others:
            module.register_parameter(other_name, owner.get_parameter(name))


def _named(model: nn.Module) -> Iterator[tuple[list[str], nn.Parameter]]:
    """Each parameter once, with all its names."""
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    return ((names[key], parameter) for key, parameter in parameters.items())


@torch.no_grad()
def _fill(parameter: nn.Parameter, initializer: Initializer, seed: int, name: str) -> None:
    whole = parameter.detach()
    local = whole.to_local() if isinstance(whole, DTensor) else whole
    if initializer.kind in ("ones", "zeros"):
        local.fill_(1.0 if initializer.kind == "ones" else 0.0)
        return
    cut = initializer.cut if initializer.kind == "truncated_normal" else math.inf
    stream = NormalStream(seed, name, std=initializer.std, cut=cut)
    in_place = local.device.type == "cpu" and local.dtype == torch.float32 and local.is_contiguous()
    staging = local if in_place else torch.empty(local.shape, dtype=torch.float32)
    flat = staging.view(-1).numpy()
    done = 0
    for start, length in _runs(tuple(whole.shape), _ranges(whole)):
        stream.read(start, flat[done : done + length])
        done += length
    assert done == local.numel(), f"{name}: shard of {local.numel()} elements, {done} filled"
    if not in_place:
        local.copy_(staging)


Range = tuple[int, int]


def _ranges(tensor: Tensor) -> list[Range]:
    """Which indices of each dim are this rank's, as [start, end)."""
    ranges = [(0, size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return ranges
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the mesh of the parameter"
    for placement, degree, position in zip(
        tensor.placements, tensor.device_mesh.shape, coordinate, strict=True
    ):
        if isinstance(placement, Replicate):
            continue
        assert type(placement) is Shard, f"initialisation of {placement} is not defined"
        # As torch.chunk: equal parts, the last ones smaller or empty.
        start, end = ranges[placement.dim]
        part = -(-(end - start) // degree)
        ranges[placement.dim] = (
            min(start + part * position, end),
            min(start + part * (position + 1), end),
        )
    return ranges


def _runs(shape: tuple[int, ...], ranges: list[Range]) -> Iterator[tuple[int, int]]:
    """The block as contiguous runs (flat start, length) of the whole tensor, in order."""
    split = [
        dim for dim, (size, own) in enumerate(zip(shape, ranges, strict=True)) if own != (0, size)
    ]
    inner = split[-1] if split else 0
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start, end = ranges[inner] if shape else (0, 1)
    stride = strides[inner] if shape else 1
    for outer in itertools.product(*(range(*own) for own in ranges[:inner])):
        base = sum(index * step for index, step in zip(outer, strides[:inner], strict=True))
        if end > start:
            yield base + start * stride, (end - start) * stride
