"""Sources made of other sources: names, orders and shapes change, and nothing is read for it.

Each view passes a box on to what it is made of, so that what is read is what the box needs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from armillary.checkpoint.hugging_face.source import Box, Source, replaced, shape_of


@dataclass(frozen=True, slots=True)
class Cast:
    """The same values in another dtype."""

    source: Source
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Source.shape`."""
        return self.source.shape

    def read(self, box: Box) -> Tensor:
        """See `Source.read`."""
        return self.source.read(box).to(self.dtype)


@dataclass(frozen=True, slots=True)
class Transposed:
    """The last two dims in the place of each other."""

    source: Source

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Source.shape`."""
        *outer, rows, columns = self.source.shape
        return (*outer, columns, rows)

    @property
    def dtype(self) -> torch.dtype:
        """See `Source.dtype`."""
        return self.source.dtype

    def read(self, box: Box) -> Tensor:
        """See `Source.read`."""
        *outer, rows, columns = box
        return self.source.read((*outer, columns, rows)).mT


@dataclass(frozen=True, slots=True)
class Stacked:
    """Sources of one shape along a new dim 0."""

    sources: tuple[Source, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Source.shape`."""
        return (len(self.sources), *self.sources[0].shape)

    @property
    def dtype(self) -> torch.dtype:
        """See `Source.dtype`."""
        return self.sources[0].dtype

    def read(self, box: Box) -> Tensor:
        """See `Source.read`."""
        out = torch.empty(shape_of(box), dtype=self.dtype)
        for row, source in zip(out, self.sources[slice(*box[0])], strict=True):
            row.copy_(source.read(box[1:]))
        return out


@dataclass(frozen=True, slots=True)
class Indexed:
    """One index of dim 0: what `Stacked` is made of."""

    source: Source
    index: int

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Source.shape`."""
        return self.source.shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        """See `Source.dtype`."""
        return self.source.dtype

    def read(self, box: Box) -> Tensor:
        """See `Source.read`."""
        return self.source.read(((self.index, self.index + 1), *box))[0]


@dataclass(frozen=True, slots=True)
class Woven:
    """Index i of a dim is index i // n of source i % n."""

    sources: tuple[Source, ...]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Source.shape`."""
        shape = list(self.sources[0].shape)
        shape[self.dim] *= len(self.sources)
        return tuple(shape)

    @property
    def dtype(self) -> torch.dtype:
        """See `Source.dtype`."""
        return self.sources[0].dtype

    def read(self, box: Box) -> Tensor:
        """See `Source.read`."""
        start, end = box[self.dim]
        out = torch.empty(shape_of(box), dtype=self.dtype)
        n = len(self.sources)
        for offset, source in enumerate(self.sources):
            first = -(-(start - offset) // n)  # the least i with n i + offset >= start
            last = -(-(end - offset) // n)
            if first >= last:
                continue
            place = n * first + offset - start
            index = [slice(None)] * len(box)
            index[self.dim] = slice(place, None, n)
            out[tuple(index)] = source.read(replaced(box, self.dim, first, last))
        return out


@dataclass(frozen=True, slots=True)
class Strand:
    """Indices offset, offset + n, offset + 2 n ... of a dim: what `Woven` is made of."""

    source: Source
    dim: int
    offset: int
    n: int

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Source.shape`."""
        shape = list(self.source.shape)
        shape[self.dim] //= self.n
        return tuple(shape)

    @property
    def dtype(self) -> torch.dtype:
        """See `Source.dtype`."""
        return self.source.dtype

    def read(self, box: Box) -> Tensor:
        """See `Source.read`."""
        start, end = (self.offset + self.n * index for index in box[self.dim])
        read = self.source.read(replaced(box, self.dim, start, end - self.n + 1))
        index = [slice(None)] * len(box)
        index[self.dim] = slice(None, None, self.n)
        return read[tuple(index)]


@dataclass(frozen=True, slots=True)
class Reordered:
    """Index i of a dim is index order[i] of the source."""

    source: Source
    dim: int
    order: Tensor = field(repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Source.shape`."""
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        """See `Source.dtype`."""
        return self.source.dtype

    def read(self, box: Box) -> Tensor:
        """See `Source.read`."""
        wanted = self.order[slice(*box[self.dim])]
        first, last = int(wanted.min()), int(wanted.max()) + 1
        read = self.source.read(replaced(box, self.dim, first, last))
        return read.index_select(self.dim, wanted - first)


@dataclass(frozen=True, slots=True)
class Resized:
    """The first rows of the source, with rows of zeros after its last: another vocabulary size."""

    source: Source
    rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Source.shape`."""
        return (self.rows, *self.source.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        """See `Source.dtype`."""
        return self.source.dtype

    def read(self, box: Box) -> Tensor:
        """See `Source.read`."""
        out = torch.zeros(shape_of(box), dtype=self.dtype)
        start, end = box[0]
        end = min(end, self.source.shape[0])
        if start < end:
            out[: end - start] = self.source.read(replaced(box, 0, start, end))
        return out


@dataclass(frozen=True, slots=True)
class Float8Blocks:
    """Weights in float8 e4m3 with a factor for each block of rows and columns.

    (DeepSeek-V3, arXiv 2412.19437, section 3.3.2, and the model card: `weight_scale_inv` is what
    the values of a 128 x 128 block are multiplied by.) The products are made in float32 and rounded
    once, to bfloat16, in which the model computes.
    """

    weight: Source
    """`[R, C]`."""
    scale: Source
    """`[ceil(R / 128), ceil(C / 128)]`."""
    block: tuple[int, int] = (128, 128)
    dtype: torch.dtype = torch.bfloat16

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Source.shape`."""
        return self.weight.shape

    def read(self, box: Box) -> Tensor:
        """See `Source.read`."""
        values = self.weight.read(box).float()
        sides = list(zip(box, self.block, strict=True))
        factors = self.scale.read(tuple((s // side, -(-e // side)) for (s, e), side in sides))
        for dim, ((start, end), side) in enumerate(sides):
            index = torch.arange(start, end) // side - start // side
            factors = factors.index_select(dim, index)
        return (values * factors.float()).to(self.dtype)


_HALF_STEPS = torch.tensor((0, 1, 2, 3, 4, 6, 8, 12), dtype=torch.float32) / 2
_FLOAT4 = torch.cat((_HALF_STEPS, -_HALF_STEPS))
"""What the sixteen codes of a float4 e2m1 stand for: sign, two bits of exponent, one of fraction.

(Open Compute Project, Microscaling Formats specification 1.0, section 5.3.3)
"""
_SCALE_BIAS = 127


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Weights in float4 e2m1, 32 neighbours of which share a power of two: MXFP4.

    (Open Compute Project, Microscaling Formats specification 1.0, section 5; GPT-OSS, arXiv
    2508.10925, section 2.1.) A byte holds two neighbours, the first in its low half; bfloat16 holds
    every value exactly.
    """

    blocks: Source
    """`[..., C / 32, 16]` uint8."""
    scales: Source
    """`[..., C / 32]` uint8: the exponent plus 127."""
    dtype: torch.dtype = torch.bfloat16

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Source.shape`."""
        *outer, blocks, half = self.blocks.shape
        return (*outer, blocks * half * 2)

    def read(self, box: Box) -> Tensor:
        """See `Source.read`."""
        *outer, (start, end) = box
        width = 2 * self.blocks.shape[-1]
        first, last = start // width, -(-end // width)
        packed = self.blocks.read((*outer, (first, last), (0, width // 2)))
        exponents = self.scales.read((*outer, (first, last))).to(torch.int32) - _SCALE_BIAS
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)  # [..., blocks, 32]
        values = torch.ldexp(_FLOAT4[codes.long()], exponents[..., None])
        return values.flatten(-2)[..., start - first * width : end - first * width].to(self.dtype)


def halves_of_pairs(heads: int, plain: int, rotated: int) -> Tensor:
    """Order of rows that brings pairs of neighbours to halves, in each head's rotated last part.

    Row i of the result is row order[i] of weights whose rotated pairs are neighbours, as DeepSeek
    publishes them; here pair i is (i, i + half).
    """
    width = plain + rotated
    of_head = [*range(plain), *range(plain, width, 2), *range(plain + 1, width, 2)]
    rows = itertools.chain.from_iterable(
        (head * width + row for row in of_head) for head in range(heads)
    )
    return torch.tensor(list(rows))
