"""From a checkpoint, what this rank's own pieces need and hardly more: whole rows of dim 0."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from armillary.checkpoint.places.place import Place
from armillary.checkpoint.ranks import Failure, Ranks
from armillary.checkpoint.tensors.index import Stored, StoredPiece
from armillary.checkpoint.tensors.pieces import Piece, Shape, pieces_of
from armillary.foundation.errors import Problem, RunError

_READ_BYTES = 1 << 25
"""Most bytes of one read, where rows are not longer; each thread holds two copies of them."""

_MOST_THREADS = 8


@dataclass(frozen=True, slots=True)
class _Rows:
    """Consecutive rows of a stored piece, and where the part of them that is wanted goes."""

    file: str
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    within: tuple[tuple[int, int], ...]
    """Of each dim but the first, the indices [start, end) that are wanted."""
    target: Tensor
    """All rows, of those indices."""

    @property
    def end(self) -> int:
        """The byte after the last one."""
        return self.start + math.prod(self.shape) * self.dtype.itemsize

    def fill(self, data: bytearray, base: int) -> None:
        """Copies what is wanted out of bytes that begin at `base` in the file."""
        values = torch.frombuffer(
            data, dtype=self.dtype, offset=self.start - base, count=math.prod(self.shape)
        ).view(self.shape)
        for dim, (first, last) in enumerate(self.within, start=1):
            values = values.narrow(dim, first, last - first)
        self.target.copy_(values)


def read_tensors(
    place: Place,
    folder: str,
    tensors: Mapping[str, Tensor],
    ranks: Ranks,
    stored: Mapping[str, Stored],
    *,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Fills tensors in place, plain or DTensors; every rank calls it alike, for what it holds.

    Args:
        place: where the checkpoint lies.
        folder: its folder there.
        tensors: what to fill; `require_match` has compared names, shapes and dtypes.
        ranks: all that read.
        stored: the checkpoint's own tensors, from `stored_tensors`.
        check: called between reads; may raise to end them, on all ranks.

    Returns:
        Bytes that this rank has read.

    Raises:
        RunError: some rank could not read.
    """
    try:
        own = ranks.together(lambda: _read(place, folder, pieces_of(tensors), stored, check))
    except Failure as failure:
        message = f"cannot read checkpoint {place.address}/{folder}: {failure}"
        raise RunError(Problem(message)) from failure
    return own[ranks.rank]


def read_tensor(place: Place, folder: str, stored: Stored) -> Tensor:
    """One whole tensor, in host memory.

    Raises:
        OSError: it could not be read.
    """
    return read_box(place, folder, stored, tuple((0, size) for size in stored.shape))[0]


def read_box(
    place: Place, folder: str, stored: Stored, box: tuple[tuple[int, int], ...]
) -> tuple[Tensor, int]:
    """The values at indices [start, end) of each dim, in host memory; and the bytes read for them.

    Raises:
        OSError: they could not be read.
    """
    part = torch.empty([end - start for start, end in box], dtype=stored.dtype)
    piece = Piece("", stored.shape, tuple(start for start, _ in box), part)
    return part, _read(place, folder, [piece], {"": stored})


def _read(
    place: Place,
    folder: str,
    pieces: Iterable[Piece],
    stored: Mapping[str, Stored],
    check: Callable[[], None] = lambda: None,
) -> int:
    wanted = [rows for piece in pieces for rows in _rows_for(piece, stored[piece.name])]

    def read(group: list[_Rows]) -> int:
        start, end = group[0].start, group[-1].end
        data = bytearray(place.read(f"{folder}/{group[0].file}", start, end - start))
        if len(data) != end - start:
            raise OSError(f"{group[0].file} ends within a tensor")
        for rows in group:
            rows.fill(data, start)
        return len(data)

    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    total = 0
    with ThreadPoolExecutor(threads) as pool:  # requests of an object store overlap
        try:
            for size in pool.map(read, _groups(wanted)):
                check()
                total += size
        finally:
            pool.shutdown(cancel_futures=True)
    return total


def _rows_for(own: Piece, stored: Stored) -> Iterator[_Rows]:
    """The rows of stored pieces that overlap an own piece."""
    target, offset = own.data, own.offset
    if not own.whole:  # a single value is a row of one
        target, offset = target.view(1), (0,)
    covered = 0
    for piece in stored.pieces:
        at = piece if own.whole else StoredPiece((0,), (1,), piece.file, piece.start)
        common = _common(offset, target.shape, at)
        if any(end <= start for start, end in common):
            continue
        covered += math.prod(end - start for start, end in common)
        box = target
        for dim, (start, end) in enumerate(common):
            box = box.narrow(dim, start - offset[dim], end - start)
        rest = zip(common[1:], at.offset[1:], strict=True)
        within = tuple((start - first, end - first) for (start, end), first in rest)
        row_bytes = math.prod(at.shape[1:]) * stored.dtype.itemsize
        begin = at.start + (common[0][0] - at.offset[0]) * row_bytes
        most = max(1, _READ_BYTES // row_bytes)
        for done in range(0, box.shape[0], most):
            part = box[done : done + most]
            shape = (part.shape[0], *at.shape[1:])
            yield _Rows(at.file, begin + done * row_bytes, shape, stored.dtype, within, part)
    if covered != target.numel():
        raise OSError(f"{covered} of {target.numel()} values of {own.name} are there")


def _common(offset: Shape, shape: Iterable[int], piece: StoredPiece) -> list[tuple[int, int]]:
    """Of each dim of the whole, the indices [start, end) that a box and a stored piece share."""
    dims = zip(offset, shape, piece.offset, piece.shape, strict=True)
    return [(max(o, p), min(o + n, p + m)) for o, n, p, m in dims]


def _groups(wanted: list[_Rows]) -> Iterator[list[_Rows]]:
    """Rows that follow each other in a file, to be read at once."""
    group: list[_Rows] = []
    for rows in sorted(wanted, key=lambda rows: (rows.file, rows.start)):
        follows = group and group[-1].file == rows.file and group[-1].end == rows.start
        if not follows or rows.end - group[0].start > _READ_BYTES:
            if group:
                yield group
            group = []
        group.append(rows)
    if group:
        yield group
