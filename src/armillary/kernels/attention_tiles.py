"""Attention cut into tiles: some rows and heads, a block of queries, the keys that it sees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BLOCK = 128
_LEAST_BLOCK = 16
_SCRATCH_ELEMENTS = 1 << 20
"""Scores that one step of the loop holds at a time; 4 MiB in fp32, to stay in cache."""
_MOST_ELEMENTS = 1 << 24
"""Scores beyond which blocks of queries get smaller; 64 MiB in fp32."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A block of queries and the keys that any of them sees, for some rows."""

    queries: slice
    keys: slice
    masks: list[tuple[slice, Tensor]]
    """Which of the tile's keys not all queries see, and 0 or -inf, `[rows or 1, 1, Q, keys]`."""

    def scores(self, query: Tensor, scaled_key: Tensor, rows: int) -> Tensor:
        """`[rows x K, groups x Q, keys]`; -inf where hidden."""
        scores = torch.bmm(query, scaled_key[:, self.keys].mT)
        by_row = scores.view(rows, -1, self.queries.stop - self.queries.start, scores.shape[-1])
        for span, mask in self.masks:
            by_row[..., span] += mask
        return scores


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows and heads, with the tiles in which they are computed."""

    rows: slice
    kv_heads: slice
    heads: slice
    tiles: list[Tile]

    @property
    def kv_count(self) -> int:
        return self.kv_heads.stop - self.kv_heads.start  # type: ignore[no-any-return]


def parts_of(
    query: Tensor, key: Tensor, query_index: Tensor, key_index: Tensor, starts: Tensor | None
) -> Iterator[Part]:
    """Cuts the work by rows, kv heads and queries: the scores of a tile fit the scratch."""
    batch, heads, length, _ = query.shape
    kv_heads, groups, keys = key.shape[1], heads // key.shape[1], key.shape[2]
    if 0 in (batch, length, keys):
        return
    block = min(length, max(_LEAST_BLOCK, min(_BLOCK, _MOST_ELEMENTS // (groups * keys))))
    per_kv_head = groups * block * keys
    kv_step = max(1, min(kv_heads, _SCRATCH_ELEMENTS // per_kv_head))
    row_step = max(1, min(batch, _SCRATCH_ELEMENTS // (per_kv_head * kv_heads)))
    places = _Places.of(query_index, key_index)
    tiles = _tiles(places, None, block)
    for row in range(0, batch, row_step):
        rows = slice(row, min(row + row_step, batch))
        if starts is not None:
            tiles = _tiles(places, starts[rows], block)
        for head in range(0, kv_heads, kv_step):
            kv = slice(head, min(head + kv_step, kv_heads))
            yield Part(rows, kv, slice(kv.start * groups, kv.stop * groups), tiles)


@dataclass(frozen=True, slots=True)
class _Places:
    """Indices of queries and keys, on the device and on the host."""

    query: Tensor
    key: Tensor
    host_query: NDArray[np.int64]
    host_key: NDArray[np.int64]

    @classmethod
    def of(cls, query_index: Tensor, key_index: Tensor) -> _Places:
        places = cls(query_index, key_index, query_index.cpu().numpy(), key_index.cpu().numpy())
        assert (np.diff(places.host_key) > 0).all(), "key_index must ascend"
        return places


def _tiles(places: _Places, starts: Tensor | None, block: int) -> list[Tile]:
    tiles = []
    length = len(places.host_query)
    lowest, highest = _first_seen(starts, length, block)
    for number, begin in enumerate(range(0, length, block)):
        queries = slice(begin, min(begin + block, length))
        own = places.host_query[queries]
        first = int(np.searchsorted(places.host_key, lowest[number], "left"))
        end = int(np.searchsorted(places.host_key, own.max(), "right"))
        if first >= end:
            continue
        first = first // _BLOCK * _BLOCK  # few distinct shapes: a GEMM library plans once for each
        # All queries see the keys from `sure` to `doubtful`; around them a mask decides.
        sure = int(np.searchsorted(places.host_key, highest[number], "left"))
        doubtful = int(np.searchsorted(places.host_key, own.min(), "right"))
        if sure >= doubtful:
            sure = doubtful = end
        spans = [slice(first, sure), slice(doubtful, end)]
        masks = [
            (slice(span.start - first, span.stop - first), _mask(places, starts, queries, span))
            for span in spans
            if span.start < span.stop
        ]
        tiles.append(Tile(queries, slice(first, end), masks))
    return tiles


def _first_seen(
    starts: Tensor | None, length: int, block: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Lowest and highest of `starts` in each block of queries, in one transfer to the host."""
    count = -(-length // block)
    if starts is None:
        nothing = np.zeros(count, np.int64)
        return nothing, nothing
    blocks = torch.split(starts, block, dim=1)
    low = torch.stack([x.min() for x in blocks])
    high = torch.stack([x.max() for x in blocks])
    both = torch.stack((low, high)).cpu().numpy()
    return both[0], both[1]


def _mask(places: _Places, starts: Tensor | None, queries: slice, keys: slice) -> Tensor:
    own, key = places.query[queries, None], places.key[keys]
    hidden = (key > own)[None, None]  # [1, 1, Q, keys]
    if starts is not None:
        hidden = hidden | (key < starts[:, None, queries, None])
    mask = torch.zeros(hidden.shape, device=hidden.device)
    return mask.masked_fill_(hidden, -torch.inf)


def flat(x: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """`[rows, heads, n, P]` -> contiguous `[rows x kv_heads, groups x n, P]`, in one pass."""
    x = x.to(dtype, memory_format=torch.contiguous_format).contiguous()
    return x.view(x.shape[0] * kv_heads, -1, x.shape[-1])
