"""Pieces to files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from armillary.checkpoint.places.place import Place, Written
from armillary.checkpoint.ranks import Ranks
from armillary.checkpoint.tensors.index import INDEX_NAME
from armillary.checkpoint.tensors.pieces import Piece, chunks_of
from armillary.checkpoint.tensors.plan import Entry, PlannedFile, Planner

_THREADS = 4
"""Files that a rank writes at the same time; an object store takes them in faster so."""


def write_tensors(
    pieces: Sequence[Piece], place: Place, folder: str, ranks: Ranks, planner: Planner
) -> dict[str, Written]:
    """Writes what all ranks hold into a folder of a place; every rank calls it alike.

    Returns, on every rank, the files of all of them, durable, by their names in the folder.

    Raises:
        Failure: some rank could not write.
    """
    plan = planner.plan(pieces, ranks)
    held = {Entry.of(piece): piece.data for piece in pieces}

    def write_own() -> dict[str, Written]:
        contents: dict[str, Iterable[bytes | memoryview]] = {
            file.name: _Content(file, held) for file in plan.files
        }
        if ranks.rank == 0:
            contents[INDEX_NAME] = [plan.index]
        with ThreadPoolExecutor(_THREADS) as pool:
            written = pool.map(
                lambda each: place.write(f"{folder}/{each[0]}", each[1]), contents.items()
            )
            return dict(zip(contents, written, strict=True))

    return {name: file for own in ranks.together(write_own) for name, file in sorted(own.items())}


@dataclass(frozen=True, slots=True)
class _Content:
    """The bytes of a file, as often as they are asked for."""

    file: PlannedFile
    held: Mapping[Entry, Tensor]

    def __iter__(self) -> Iterator[bytes | memoryview]:
        yield self.file.header
        for entry in self.file.entries:
            yield from chunks_of(self.held[entry])
