"""What this rank holds: each tensor as a piece of a whole one, found through torch's public API."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

assert sys.byteorder == "little", "the files hold the bytes of little-endian machines"

Shape = tuple[int, ...]

_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a whole tensor."""

    name: str
    """Of the whole tensor."""
    whole: Shape
    """Shape of the whole tensor."""
    offset: Shape
    """Where in it the box begins, in each dim."""
    data: Tensor
    """The values in the box, on any device; the memory that training uses, or a copy."""


def flatten(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Nested dictionaries of tensors as one, keyed by dotted names; shares memory."""
    flat: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if isinstance(value, Mapping):
            below = {f"{name}.{rest}": tensor for rest, tensor in flatten(value).items()}
        else:
            assert isinstance(value, Tensor), f"{name} is a {type(value).__name__}, not a tensor"
            below = {name: value.detach() if value.requires_grad else value}
        assert flat.keys().isdisjoint(below), f"two tensors in {name} have the same name"
        flat |= below
    return flat


def pieces_of(tensors: Mapping[str, Tensor]) -> list[Piece]:
    """This rank's pieces of detached tensors, plain (and then whole) or DTensors; shares memory."""
    return [_piece(name, tensor) for name, tensor in tensors.items()]


def pieces_in(tensors: Mapping[str, Any]) -> Iterator[Piece]:
    """The same of nested dictionaries; nothing is looked at before the first one is asked for."""
    yield from pieces_of(flatten(tensors))


def chunks_of(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor's values in order of rows, little at a time."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, data.numel(), _CHUNK_BYTES):
        yield data[start : start + _CHUNK_BYTES].numpy().data


def digest(pieces: Iterable[Piece]) -> str:
    """Hexadecimal SHA-256 of names, places and values: equal only for equal pieces."""
    total = hashlib.sha256()
    for piece in sorted(pieces, key=lambda piece: (piece.name, piece.offset)):
        data = piece.data
        words = (piece.name, piece.whole, piece.offset, tuple(data.shape), str(data.dtype))
        total.update(repr(words).encode())
        for chunk in chunks_of(data):
            total.update(chunk)
    return total.hexdigest()


def _piece(name: str, tensor: Tensor) -> Piece:
    if not isinstance(tensor, DTensor):
        return Piece(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor)
    ranges = [(0, size) for size in tensor.shape]
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, f"{name} lies on a mesh that this rank is not in"
    axes = zip(tensor.device_mesh.shape, coordinate, tensor.placements, strict=True)
    for degree, place, placement in axes:  # from left to right, as they cut
        if isinstance(placement, Shard):
            ranges[placement.dim] = _chunk(ranges[placement.dim], degree, place)
        else:
            assert isinstance(placement, Replicate), f"{name} is placed as {placement}"
    local = tensor.to_local()
    shape = tuple(end - start for start, end in ranges)
    assert local.numel() == math.prod(shape), f"{name}: {tuple(local.shape)} here, not {shape}"
    # An empty shard comes in whatever shape.
    return Piece(name, tuple(tensor.shape), tuple(start for start, _ in ranges), local.view(shape))


def _chunk(indices: tuple[int, int], parts: int, place: int) -> tuple[int, int]:
    """The part of a range that `torch.chunk` gives to a place: all equal, the last ones shorter."""
    start, end = indices
    part = -(-(end - start) // parts)
    first = min(start + part * place, end)
    return first, min(first + part, end)
