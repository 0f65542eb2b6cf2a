"""Which rank writes which piece, and where it comes to lie: the same answer on every rank.

A piece that several ranks hold is written by one of them, so that all write about as many bytes.
What ranks hold does not change from save to save, so the tables are exchanged once; after that a
digest from each rank is enough.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from armillary.checkpoint.ranks import Ranks
from armillary.checkpoint.tensors.index import DTYPES, NAMES, Stored, StoredPiece, render_index
from armillary.checkpoint.tensors.pieces import Piece, Shape

_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """What the others need to know of a piece."""

    name: str
    dtype: str
    """As safetensors calls it."""
    whole: Shape
    offset: Shape
    shape: Shape

    @classmethod
    def of(cls, piece: Piece) -> Entry:
        """Of a piece that this rank holds."""
        dtype = NAMES.get(piece.data.dtype)
        assert dtype is not None, f"{piece.name}: no {piece.data.dtype} in a checkpoint"
        return cls(piece.name, dtype, piece.whole, piece.offset, tuple(piece.data.shape))

    @property
    def bytes(self) -> int:
        """Of its values."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def title(self) -> str:
        """Its name in a file: that of the whole tensor, and which part of it, if it is a part."""
        if self.shape == self.whole:
            return self.name
        parts = (f"{o}:{o + n}" for o, n in zip(self.offset, self.shape, strict=True))
        return f"{self.name}[{','.join(parts)}]"


Table = tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file of a rank, as it will be."""

    name: str
    header: bytes
    """All before the values."""
    entries: Table
    """The pieces in it, in order."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One rank's part in writing a checkpoint."""

    files: tuple[PlannedFile, ...]
    """What this rank writes."""
    index: bytes
    """What rank 0 writes besides; see `index`."""
    tensors: dict[str, Stored]
    """All tensors of all ranks."""


class Planner:
    """Plans, and remembers the plan for as long as no rank holds anything else.

    Args:
        file_bytes: of tensors in one file, at most; a larger piece has a file of its own.
    """

    def __init__(self, file_bytes: int = 1 << 32) -> None:
        self.exchanges = 0
        """How often tables were exchanged."""
        self._file_bytes = file_bytes
        self._digests: list[str] = []
        self._plan = Plan((), b"", {})

    def plan(self, pieces: Sequence[Piece], ranks: Ranks) -> Plan:
        """This rank's part; every rank calls it alike."""
        own = tuple(Entry.of(piece) for piece in pieces)
        digest = hashlib.sha256(repr(own).encode()).hexdigest()
        digests = ranks.together(lambda: digest)
        if digests != self._digests:
            # Of ranks that hold the same, the first one speaks.
            speaks = digests.index(digest) == ranks.rank
            told = ranks.together(lambda: own if speaks else ())
            tables = [told[digests.index(each)] for each in digests]
            self._plan = plan_of(tables, ranks.rank, self._file_bytes)
            self._digests = digests
            self.exchanges += 1
        return self._plan


def plan_of(tables: Sequence[Table], rank: int, file_bytes: int) -> Plan:
    """The part of one rank in writing what all of them hold."""
    shares = share_out(tables)
    files = [list(_files(number, share, file_bytes)) for number, share in enumerate(shares)]
    placed: dict[str, list[StoredPiece]] = {}
    for file in (file for own in files for file in own):
        start = len(file.header)
        for entry in file.entries:
            piece = StoredPiece(entry.offset, entry.shape, file.name, start)
            placed.setdefault(entry.name, []).append(piece)
            start += entry.bytes
    kinds: dict[str, tuple[Shape, str]] = {}
    for entry in (entry for table in tables for entry in table):
        kind = kinds.setdefault(entry.name, (entry.whole, entry.dtype))
        assert kind == (entry.whole, entry.dtype), f"ranks disagree on {entry.name}"
    tensors = {
        name: Stored(whole, DTYPES[dtype], tuple(placed.get(name, ())))
        for name, (whole, dtype) in kinds.items()
    }
    for name, stored in tensors.items():
        values = sum(math.prod(piece.shape) for piece in stored.pieces)
        assert values == math.prod(stored.shape), f"{values} of {stored.shape} of {name} are there"
    return Plan(tuple(files[rank]), render_index(tensors) if rank == 0 else b"", tensors)


def share_out(tables: Sequence[Table]) -> list[list[Entry]]:
    """What each rank writes of what it holds; each piece once, and alike in bytes."""
    holders: dict[Entry, list[int]] = {}
    for rank, table in enumerate(tables):
        for entry in table:
            if entry.bytes:
                holders.setdefault(entry, []).append(rank)
    loads = [0] * len(tables)
    shares: list[list[Entry]] = [[] for _ in tables]
    # First what leaves no choice, then the large ones, so that small ones even it out.
    for entry, among in sorted(holders.items(), key=lambda e: (len(e[1]) > 1, -e[0].bytes)):
        rank = min(among, key=loads.__getitem__)
        loads[rank] += entry.bytes
        shares[rank].append(entry)
    return shares


def _files(rank: int, share: Iterable[Entry], file_bytes: int) -> Iterator[PlannedFile]:
    # Wide dtypes first: then every piece begins at a multiple of its items.
    width = {entry: DTYPES[entry.dtype].itemsize for entry in share}
    groups: list[list[Entry]] = []
    size = 0
    for entry in sorted(width, key=lambda e: (-width[e], e.name, e.offset)):
        if not groups or size + entry.bytes > file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.bytes
    for number, group in enumerate(groups):
        name = f"rank-{rank:05d}" + (f"-{number + 1:05d}" if len(groups) > 1 else "")
        yield PlannedFile(f"{name}.safetensors", _header(group), tuple(group))


def _header(entries: Iterable[Entry]) -> bytes:
    """The head of a safetensors file: a length of 8 bytes, then JSON, padded with spaces."""
    plain: dict[str, object] = {"__metadata__": {"format": "armillary"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.bytes
        assert entry.title not in plain, f"two tensors are called {entry.title}"
        place = {"shape": entry.shape, "data_offsets": [start, end]}
        plain[entry.title] = {"dtype": entry.dtype, **place}
    text = json.dumps(plain, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
