"""Tensors that are read when they are asked for, a box at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Box = tuple[tuple[int, int], ...]
"""Of each dim, the indices [start, end)."""

CHUNK_BYTES = 1 << 24
"""About how much is held at once where a tensor is gone through."""


class Source(Protocol):
    """A tensor that lies somewhere; nothing of it is in memory until `read`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its values as `read` gives them."""

    def read(self, box: Box) -> Tensor:
        """The values in a box, in host memory.

        Raises:
            OSError: they could not be read.
        """


Sources = Mapping[str, Source]


@dataclass(slots=True)
class Tally:
    """How much was read, over all sources that share it."""

    bytes_read: int = 0
    """Bytes that were asked of files or stores."""


@dataclass(frozen=True, slots=True)
class Live:
    """A tensor in memory."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Source.shape`."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """See `Source.dtype`."""
        return self.tensor.dtype

    def read(self, box: Box) -> Tensor:
        """See `Source.read`."""
        return narrowed(self.tensor.detach(), box).cpu()


@dataclass(frozen=True, slots=True)
class Filled:
    """A tensor of one value everywhere."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    value: float = 0.0

    def read(self, box: Box) -> Tensor:
        """See `Source.read`."""
        return torch.full(shape_of(box), self.value, dtype=self.dtype)


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor."""
    return tuple((0, size) for size in shape)


def read_all(source: Source) -> Tensor:
    """A whole tensor."""
    return source.read(whole(source.shape))


def shape_of(box: Box) -> tuple[int, ...]:
    """Extents of a box."""
    return tuple(end - start for start, end in box)


def narrowed(tensor: Tensor, box: Box) -> Tensor:
    """The part of a tensor in a box; the same memory."""
    for dim, (start, end) in enumerate(box):
        tensor = tensor.narrow(dim, start, end - start)
    return tensor


def replaced(box: Box, dim: int, start: int, end: int) -> Box:
    """The box with other indices in one dim."""
    return (*box[:dim], (start, end), *box[dim + 1 :])


def pieces_of(box: Box, item_bytes: int, most: int = CHUNK_BYTES) -> Iterator[Box]:
    """A box in parts of about `most` bytes, which follow each other in order of rows."""
    if math.prod(shape_of(box)) == 0:
        return
    if not box:  # a single value
        yield box
        return
    dim, inner = len(box) - 1, item_bytes
    while dim > 0 and inner * shape_of(box)[dim] <= most:
        inner *= shape_of(box)[dim]
        dim -= 1
    yield from _split(box, dim, max(1, most // inner))


def _split(box: Box, dim: int, step: int) -> Iterator[Box]:
    """All dims before `dim` one by one, and `dim` itself by `step`."""
    if dim == 0 or all(end - start == 1 for start, end in box[:dim]):
        start, end = box[dim]
        for first in range(start, end, step):
            yield replaced(box, dim, first, min(first + step, end))
        return
    outer = next(d for d in range(dim) if box[d][1] - box[d][0] > 1)
    for index in range(*box[outer]):
        yield from _split(replaced(box, outer, index, index + 1), dim, step)
