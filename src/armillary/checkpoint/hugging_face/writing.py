"""Sources to files: shards that others load, and a checkpoint of ours; a little at a time."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from armillary.checkpoint.hugging_face.files import INDEX_NAME
from armillary.checkpoint.hugging_face.source import Source, Sources, pieces_of, whole
from armillary.checkpoint.hugging_face.tokenizer import write_json
from armillary.checkpoint.manifest import STATE_NAME, compose, render, step_name
from armillary.checkpoint.places.place import Place
from armillary.checkpoint.tensors.index import INDEX_NAME as OWN_INDEX
from armillary.checkpoint.tensors.index import NAMES
from armillary.checkpoint.tensors.pieces import chunks_of
from armillary.checkpoint.tensors.plan import Entry, plan_of

Advance = Callable[[int], object]
"""Told of bytes that were written."""


def bytes_of(source: Source) -> int:
    """Of all its values."""
    return math.prod(source.shape) * source.dtype.itemsize


def _bytes_in_order(source: Source, advance: Advance) -> Iterator[memoryview]:
    for box in pieces_of(whole(source.shape), source.dtype.itemsize):
        for chunk in chunks_of(source.read(box)):
            yield chunk
            advance(len(chunk))


def write_shards(
    folder: Path, tensors: Sources, shard_bytes: int, advance: Advance = lambda count: None
) -> None:
    """`model-00001-of-0000N.safetensors` and their index.

    Args:
        folder: it is there.
        tensors: by their names in the files, in this order.
        shard_bytes: of values in one file, at most; a larger tensor has a file of its own.
        advance: see `Advance`.

    Raises:
        OSError: a file could not be written, or a source not be read.
    """
    shards: list[dict[str, Source]] = [{}]
    size = 0
    for name, source in tensors.items():
        if shards[-1] and size + bytes_of(source) > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = source
        size += bytes_of(source)
    placed: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        placed |= dict.fromkeys(shard, file)
        with (folder / file).open("wb") as out:
            out.write(_header(shard))
            for source in shard.values():
                for chunk in _bytes_in_order(source, advance):
                    out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    total = sum(bytes_of(source) for source in tensors.values())
    write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": placed})


def _header(tensors: Sources) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, source in tensors.items():
        start, end = end, end + bytes_of(source)
        kind = {"dtype": NAMES[source.dtype], "shape": list(source.shape)}
        header[name] = kind | {"data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_checkpoint(
    place: Place,
    weights: Sources,
    scalars: Mapping[str, Any],
    manifest: Mapping[str, Any],
    advance: Advance = lambda count: None,
) -> None:
    """A checkpoint of step 0 that holds weights alone.

    Raises:
        OSError: it could not be written, or a source not be read; no checkpoint is there then.
    """
    named = {f"model.{name}": source for name, source in weights.items()}
    table = tuple(
        Entry(name, NAMES[s.dtype], tuple(s.shape), (0,) * len(s.shape), tuple(s.shape))
        for name, s in named.items()
    )
    plan = plan_of([table], 0, place.file_bytes)
    draft = place.begin(step_name(0))
    try:
        files = {}
        for file in plan.files:
            content = _Content(file.header, [named[e.name] for e in file.entries], advance)
            files[file.name] = place.write(f"{draft.folder}/{file.name}", content)
        files[OWN_INDEX] = place.write(f"{draft.folder}/{OWN_INDEX}", [plan.index])
        state = json.dumps(dict(scalars), indent=1) + "\n"
        files[STATE_NAME] = place.write(f"{draft.folder}/{STATE_NAME}", [state.encode()])
    except BaseException:
        place.remove(draft.folder)
        raise
    made = {f"{draft.prefix}{name}": file for name, file in files.items()}
    place.publish(draft, render(compose(0, made, scalars, manifest)))


class _Content:
    """The bytes of a file, as often as they are asked for."""

    def __init__(self, header: bytes, sources: Sequence[Source], advance: Advance) -> None:
        self._header, self._sources, self._advance = header, sources, advance

    def __iter__(self) -> Iterator[bytes | memoryview]:
        yield self._header
        for source in self._sources:
            yield from _bytes_in_order(source, self._advance)


DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
"""Formats of weights, by the names that people type."""
