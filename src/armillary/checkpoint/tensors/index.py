"""`tensors.json`: where each piece of each tensor lies. The only way into the tensors' files.

    {"model.norm.weight": {"dtype": "F32", "shape": [64], "pieces":
      [{"offset": [0], "shape": [64], "file": "rank-00000.safetensors", "start": 1344}]}, ...}

`start` counts bytes from the beginning of the file; a piece has its rows there, one after another,
little-endian. It is read without trust: what does not hold together is refused with a reason, and
no name in it can lead to another file than those of its own folder.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from armillary.checkpoint.manifest import Unverified
from armillary.checkpoint.places.place import Place
from armillary.checkpoint.tensors.pieces import Shape
from armillary.foundation.errors import Problem, RunError, UserError
from armillary.foundation.strict_json import parse_json

INDEX_NAME = "tensors.json"

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their names in safetensors."""

NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
"""The other way round."""

_FILE = re.compile(r"rank-\d{5}(?:-\d{5})?\.safetensors")
_MOST_DIMS = 64
_MOST_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A box of a tensor, in a file."""

    offset: Shape
    """Where in the whole tensor it begins."""
    shape: Shape
    """Its extent in each dim."""
    file: str
    """Name of the file in the checkpoint."""
    start: int
    """Its first byte in the file."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A whole tensor as a checkpoint, or all ranks together, know it."""

    shape: Shape
    dtype: torch.dtype
    pieces: tuple[StoredPiece, ...] = ()
    """Where it lies; they cover it. None where it is only described."""

    @property
    def bytes(self) -> int:
        """Of all its values."""
        return math.prod(self.shape) * self.dtype.itemsize


def logical_bytes(tensors: Mapping[str, Stored]) -> int:
    """Bytes of all tensors at their global shapes: the size of a checkpoint, headers aside."""
    return sum(each.bytes for each in tensors.values())


def stored_tensors(place: Place, folder: str) -> dict[str, Stored]:
    """The tensors in a checkpoint's folder, by name.

    Raises:
        UserError: the index is not one of ours.
        RunError: it could not be read.
    """
    try:
        return parse_index(place.read(f"{folder}/{INDEX_NAME}"), place.files(folder))
    except Unverified as reason:
        message = f"checkpoint {place.address}/{folder} is not one of ours: {reason}"
        raise UserError(Problem(message, fix="take another checkpoint")) from None
    except OSError as error:
        message = f"cannot read checkpoint {place.address}/{folder}: {error}"
        raise RunError(Problem(message)) from error


def render_index(tensors: Mapping[str, Stored]) -> bytes:
    """The index as it lies on disk."""
    plain = {
        name: {
            "dtype": NAMES[stored.dtype],
            "shape": stored.shape,
            "pieces": [
                {"offset": p.offset, "shape": p.shape, "file": p.file, "start": p.start}
                for p in stored.pieces
            ],
        }
        for name, stored in sorted(tensors.items())
    }
    return json.dumps(plain, separators=(",", ":")).encode()


def parse_index(data: bytes, files: Mapping[str, int]) -> dict[str, Stored]:
    """The inverse of `render_index`.

    Args:
        data: the index.
        files: bytes of each file in its folder.

    Raises:
        Unverified: what is wrong with it.
    """
    try:
        plain = parse_json(data)
    except ValueError as error:
        raise Unverified(f"{INDEX_NAME} is unreadable ({error})") from None
    if not isinstance(plain, dict):
        raise Unverified(f"{INDEX_NAME} is not an index of tensors")
    if not all(name.isprintable() for name in plain):  # it is going to be shown
        raise Unverified(f"{INDEX_NAME} has a name that is none")
    return {name: _stored(name, entry, files) for name, entry in plain.items()}


def _stored(name: str, entry: Any, files: Mapping[str, int]) -> Stored:
    where = f"{INDEX_NAME}: {_shown(name)}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "pieces"}:
        raise Unverified(f"{where} is not a tensor")
    known = isinstance(entry["dtype"], str) and entry["dtype"] in DTYPES
    if not known:
        raise Unverified(f"{where} has a dtype that is not known: {_shown(entry['dtype'])}")
    dtype, shape = DTYPES[entry["dtype"]], _numbers(entry["shape"], where)
    if math.prod(shape) * dtype.itemsize > _MOST_BYTES:
        raise Unverified(f"{where} would have {math.prod(shape)} values")
    if not isinstance(entry["pieces"], list):
        raise Unverified(f"{where} has no list of pieces")
    pieces = tuple(_piece(each, shape, dtype, files, where) for each in entry["pieces"])
    if len({piece.offset for piece in pieces}) != len(pieces):
        raise Unverified(f"{where} has a piece twice")
    if not _are_whole(pieces, shape):
        raise Unverified(f"{where} is not all there")
    return Stored(shape, dtype, pieces)


def _are_whole(pieces: Sequence[StoredPiece], whole: Shape) -> bool:
    """Whether pieces of different offsets cover a tensor, without gaps or overlaps.

    A mesh cuts each dim by itself: the pieces are all combinations of what the dims are cut into.
    """
    if math.prod(whole) == 0:
        return not pieces
    combinations = 1
    for dim, size in enumerate(whole):
        end = 0
        parts = sorted({(piece.offset[dim], piece.shape[dim]) for piece in pieces})
        for start, length in parts:
            if start != end:
                return False
            end += length
        if end != size:
            return False
        combinations *= len(parts)
    return len(pieces) == combinations


def _piece(
    entry: Any, whole: Shape, dtype: torch.dtype, files: Mapping[str, int], where: str
) -> StoredPiece:
    if not isinstance(entry, dict) or entry.keys() != {"offset", "shape", "file", "start"}:
        raise Unverified(f"{where} has a piece that is none")
    offset, shape = _numbers(entry["offset"], where), _numbers(entry["shape"], where)
    if not len(offset) == len(shape) == len(whole):
        raise Unverified(f"{where} has a piece of other dims")
    if any(first + size > all_ for first, size, all_ in zip(offset, shape, whole, strict=True)):
        raise Unverified(f"{where} has a piece outside of it")
    if math.prod(shape) == 0:
        raise Unverified(f"{where} has an empty piece")
    file, (start,) = entry["file"], _numbers([entry["start"]], where)
    if not isinstance(file, str) or not _FILE.fullmatch(file) or file not in files:
        raise Unverified(f"{where} lies in a file that is not there: {_shown(file)}")
    if start + math.prod(shape) * dtype.itemsize > files[file]:
        raise Unverified(f"{where} lies beyond the end of {file}")
    return StoredPiece(offset, shape, file, start)


def _numbers(values: Any, where: str) -> Shape:
    if not isinstance(values, Sequence) or len(values) > _MOST_DIMS:
        raise Unverified(f"{where} has a shape or place that is none")
    if not all(type(value) is int and 0 <= value <= _MOST_BYTES for value in values):
        raise Unverified(f"{where} has a shape or place that is none")
    return tuple(values)


def _shown(value: object) -> str:
    return repr(value[:120]) if isinstance(value, str) else f"a {type(value).__name__}"
