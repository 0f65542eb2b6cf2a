"""From `meta` to memory: every rank fills its own parts, all of them of the same weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from armillary.models.layers.initializer import Initializer
from armillary.parallel.blocks import tied_parameters
from armillary.parallel.config import Parallel
from armillary.parallel.layout import Layouts, Place, Range, local_ranges, local_tensor
from armillary.parallel.mesh import Mesh
from armillary.parallel.model import ParallelModel, declared_initializers
from armillary.parallel.random_numbers import NormalStream


def materialise(model: ParallelModel | nn.Module, device: torch.device, seed: int) -> None:
    """Gives a model built on `meta` its memory and its first weights. In place, after all passes.

    The value of an element is a function of (seed, parameter name, index in the whole parameter),
    so it does not depend on the mesh, on the order of parameters or on other parameters. A rank
    computes its parts only and never holds more of a parameter than that.
    """
    if isinstance(model, nn.Module):
        alone = Mesh(parallel=Parallel().resolve(1), device=device)
        allocate(model, device)
        _fill_all(model, Layouts.of(model), alone, declared_initializers(model), seed)
        return
    home = torch.device("cpu") if model.mesh.parallel.cpu_offload else device
    for part in model.parts:
        allocate(part, home)
        _move_buffers(part, device)
        _fill_all(part, model.layouts, model.mesh, model.whole.initializers, seed)


def allocate(model: nn.Module, device: torch.device) -> None:
    """Gives a model built on `meta` memory whose content is undefined; tied weights stay tied."""
    ties = tied_parameters(model)
    persistent = model.state_dict()
    passing = [name for name, _ in model.named_buffers() if name not in persistent]
    assert not passing, f"buffers {passing} would be undefined: compute them in forward instead"
    model.to_empty(device=device)
    for (owner, name), *others in ties:
        for module, other_name in others:
            module.register_parameter(other_name, owner.get_parameter(name))


def _move_buffers(part: nn.Module, device: torch.device) -> None:
    """Buffers are used where the part computes, wherever its parameters are kept."""
    for module in part.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, torch.empty_like(buffer, device=device))


@torch.no_grad()
def _fill_all(
    part: nn.Module,
    layouts: Layouts,
    place: Place,
    initializers: Mapping[str, Initializer],
    seed: int,
) -> None:
    filled: set[int] = set()
    for name, tensor in part.state_dict(keep_vars=True).items():
        if id(tensor) in filled:
            continue
        filled.add(id(tensor))
        canonical = layouts.canonical(name)
        assert canonical in initializers, f"{name} has no initializer"
        layout, initializer = layouts[canonical], initializers[canonical]
        local = local_tensor(tensor.detach())
        if initializer.kind in ("ones", "zeros"):
            local.fill_(1.0 if initializer.kind == "ones" else 0.0)
            continue
        cut = initializer.cut if initializer.kind == "truncated_normal" else math.inf
        stream = NormalStream(seed, canonical, std=initializer.std, cut=cut)
        runs = _runs(layout.shape, local_ranges(layout, place))
        assert _read(stream, runs, local) == local.numel(), f"{name}: {layout} is not what is here"


def _read(stream: NormalStream, runs: Iterator[tuple[int, int]], local: Tensor) -> int:
    """Fills a tensor with runs of numbers; returns how many there were."""
    in_place = local.device.type == "cpu" and local.dtype == torch.float32 and local.is_contiguous()
    staging = local if in_place else torch.empty(local.shape, dtype=torch.float32)
    flat = staging.view(-1).numpy()
    done = 0
    for start, length in runs:
        stream.read(start, flat[done : done + length])
        done += length
    if not in_place:
        local.copy_(staging)
    return done


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
