"""A folder of safetensors files as sources, by reads of byte ranges.

(Format: https://github.com/huggingface/safetensors, README: 8 bytes with the length of the header,
little-endian; the header, a JSON object; then the values.) Files are not mapped into memory: what
is read is counted, and what is resident was asked for. They come from outside: the header is read
without trust, and no name in an index leads to another folder.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from armillary.checkpoint.hugging_face.source import (
    Box,
    Source,
    Tally,
    narrowed,
    shape_of,
)
from armillary.checkpoint.tensors.index import DTYPES
from armillary.foundation.errors import Problem, UserError
from armillary.foundation.strict_json import parse_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_FILE_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,200}\.safetensors", re.ASCII)
_LARGEST_HEADER = 100 * 2**20
_LARGEST_JSON = 256 * 2**20
_LEAST_RUN = 4096
"""Bytes of one read below which it costs less to read what lies between, too."""


Config = Mapping[str, Any]
"""A config.json."""


class Damaged(ValueError):
    """A file is not what its name says; the message says why, for a person."""


class File:
    """A file that is read here and there; opened by its first read."""

    def __init__(self, path: Path, tally: Tally) -> None:
        self.path, self._tally = path, tally
        self._descriptor: int | None = None

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fills a buffer with the bytes from `start`.

        Raises:
            OSError: it cannot be read, or ends before.
        """
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDONLY)
        done = 0
        while done < len(buffer):
            count = os.preadv(self._descriptor, [buffer[done:]], start + done)
            if count == 0:
                raise OSError(f"{self.path} ends within a tensor")
            done += count
        self._tally.bytes_read += done

    def __del__(self) -> None:
        if getattr(self, "_descriptor", None) is not None:
            os.close(self._descriptor)  # type: ignore[arg-type]  # narrowed by getattr


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    file: File = field(repr=False)
    start: int
    """Its first byte."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, box: Box) -> Tensor:
        """See `Source.read`."""
        item = self.dtype.itemsize
        wide = _widened(box, self.shape, item)
        out = torch.empty(shape_of(wide), dtype=self.dtype)
        if out.numel() == 0:
            return narrowed(out, tuple((0, e - s) for s, e in box))
        buffer = memoryview(out.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        done = 0
        for first, count in _runs(wide, self.shape):
            end = done + count * item
            self.file.read_into(buffer[done:end], self.start + first * item)
            done = end
        if wide == box:
            return out
        pairs = zip(box, wide, strict=True)
        return narrowed(out, tuple((s - base, e - base) for (s, e), (base, _) in pairs)).clone()


def _widened(box: Box, shape: tuple[int, ...], item: int) -> Box:
    """A box around the box whose runs are not too short to be worth a read each."""
    wide = list(box)
    for dim in reversed(range(len(wide))):
        inner = math.prod(shape[dim + 1 :]) * item
        start, end = wide[dim]
        if (end - start) * inner >= _LEAST_RUN or dim == 0:
            break
        wide[dim] = (0, shape[dim])
    return tuple(wide)


def _runs(box: Box, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """What of a box lies together: the first value, counted from the tensor's, and how many."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner = len(box)
    while inner > 0 and box[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
    if inner == 0:
        yield 0, math.prod(shape)
        return
    (start, end), stride = box[inner - 1], strides[inner - 1]

    def at(dim: int, base: int) -> Iterator[tuple[int, int]]:
        if dim == inner - 1:
            yield base + start * stride, (end - start) * stride
            return
        for index in range(*box[dim]):
            yield from at(dim + 1, base + index * strides[dim])

    yield from at(0, 0)


def open_folder(folder: Path, tally: Tally) -> dict[str, Source]:
    """The tensors of all files that belong to a model, by name.

    Raises:
        UserError: there are none, one is missing or damaged, or the index does not fit.
    """
    try:
        return _opened(folder, tally)
    except Damaged as reason:
        message = f"{folder} is no folder of weights: {reason}"
    except OSError as error:
        message = f"cannot read {error.filename or folder}: {error.strerror or error}"
    raise UserError(Problem(message, "safetensors files with config.json", "fetch them again"))


def _opened(folder: Path, tally: Tally) -> dict[str, Source]:
    index = _index(folder)
    names = sorted(set(index.values())) if index is not None else [SINGLE_NAME]
    found: dict[str, Source] = {}
    for name in names:
        path = folder / name
        if not path.is_file():
            others = sorted(each.name for each in folder.glob("*.bin"))
            hint = f"; {others[0]} is a pickle, which is not read" if others else ""
            raise Damaged(f"there is no {name}{hint}")
        for tensor, source in read_header(path, tally).items():
            if tensor in found:
                raise Damaged(f"{tensor} is in two files")
            if index is not None and index.get(tensor) != name:
                raise Damaged(f"{name} holds {tensor}, which {INDEX_NAME} does not tell of")
            found[tensor] = source
    if index is not None and (lost := sorted(index.keys() - found.keys())):
        raise Damaged(f"{index[lost[0]]} lacks {lost[0]}, which {INDEX_NAME} promises")
    return found


def _index(folder: Path) -> dict[str, str] | None:
    """Tensor to file, or None where there is no index."""
    path = folder / INDEX_NAME
    if not path.is_file():
        return None
    table = read_json(path).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise Damaged(f"{INDEX_NAME} has no weight_map")
    for name, file in table.items():
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            raise Damaged(f"{INDEX_NAME} places {name[:80]!r} in no file of this folder")
    return table


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        Damaged: it is none, or very large.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(_LARGEST_JSON + 1)
    if len(data) > _LARGEST_JSON:
        raise Damaged(f"{path.name} is larger than any of its kind")
    try:
        found = parse_json(data)
    except ValueError as error:
        raise Damaged(f"{path.name} is unreadable ({error})") from None
    if not isinstance(found, dict):
        raise Damaged(f"{path.name} is not an object")
    return found


def read_header(path: Path, tally: Tally) -> dict[str, StoredTensor]:
    """The tensors in a safetensors file, by name.

    Raises:
        Damaged: what is wrong with it.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 2 <= length <= min(_LARGEST_HEADER, size - 8):
            raise Damaged(f"{path.name} has no header")
        data = file.read(length)
    try:
        header = parse_json(data)
    except ValueError as error:
        raise Damaged(f"the header of {path.name} is unreadable ({error})") from None
    if not isinstance(header, dict):
        raise Damaged(f"the header of {path.name} is not an object")
    header.pop("__metadata__", None)
    opened, base = File(path, tally), 8 + length
    tensors = {}
    ends = []
    for name, entry in header.items():
        where = f"{path.name}: {name[:120]!r}"
        shape, dtype, start, end = _entry(entry, where)
        if base + end > size:
            raise Damaged(f"{where} lies beyond the end of the file")
        tensors[name] = StoredTensor(opened, base + start, shape, dtype)
        ends.append((start, end))
    ends.sort()
    if any(end > start for (_, end), (start, _) in itertools.pairwise(ends)):
        raise Damaged(f"{path.name} has tensors that overlap")
    return tensors


def _entry(entry: Any, where: str) -> tuple[tuple[int, ...], torch.dtype, int, int]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise Damaged(f"{where} is not a tensor")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES:
        raise Damaged(f"{where} has a dtype that is not known: {json.dumps(kind)[:40]}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise Damaged(f"{where} has a shape or place that is none")
    dtype, (start, end) = DTYPES[kind], offsets
    if end - start != math.prod(shape) * dtype.itemsize:
        raise Damaged(f"{where} has {end - start} bytes, which its shape {shape} does not")
    return tuple(shape), dtype, start, end


def _are_counts(values: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= 64
        and all(type(value) is int and 0 <= value < 2**60 for value in values)
    )


def config_of(folder: Path) -> dict[str, Any]:
    """The model's config.json.

    Raises:
        UserError: there is none, or it is not one.
    """
    try:
        return read_json(folder / "config.json")
    except Damaged as reason:
        message = f"{folder}: {reason}"
    except OSError as error:
        message = f"{folder} has no config.json: {error.strerror}"
    raise UserError(Problem(message, "a folder as Hugging Face transformers writes it"))


def is_weights_folder(folder: Path) -> bool:
    """Whether a folder looks like one of Hugging Face format."""
    return (folder / "config.json").is_file()
