"""The last step of a build: pieces become the files of a store, which then appears at once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from armillary.data.pieces import Arrays, read_arrays
from armillary.data.token_store import FORMAT, MANIFEST_FILE, SCORED_FILE, SPLITS, TOKENIZER_FOLDER
from armillary.foundation.files import sha256_of, sync_folder, write_atomically
from armillary.foundation.progress import Advance

_ARRAYS = ("tokens", "lengths", "sizes", "id_lengths", "id_text")


class _File:
    """A file of the store under way; numbers go in as they come, its SHA-256 comes out."""

    def __init__(self, path: Path, dtype: Any = None, count: int = 0) -> None:
        self.path = path
        self._dtype = None if dtype is None else np.dtype(dtype)
        self._count = count
        self._digest = hashlib.sha256()
        self._bytes = 0
        self._bits = np.zeros(0, np.bool_)

    def __enter__(self) -> Self:
        self._file = self.path.open("wb")
        if self._dtype is not None:
            header = {
                "descr": np.lib.format.dtype_to_descr(self._dtype),
                "fortran_order": False,
                "shape": (self._count,),
            }
            np.lib.format.write_array_header_1_0(self, header)
        return self

    def write(self, content: bytes) -> int:
        """Appends raw bytes."""
        self._digest.update(content)
        self._bytes += len(content)
        return self._file.write(content)

    def append(self, array: NDArray[Any]) -> None:
        """Appends the numbers of an array."""
        self.write(np.ascontiguousarray(array, self._dtype).tobytes())

    def append_bits(self, flags: NDArray[np.bool_]) -> None:
        """Appends flags, eight to a byte; those of an unfinished byte wait for `flush_bits`."""
        flags = np.concatenate([self._bits, flags])
        whole = len(flags) // 8 * 8
        self.append(np.packbits(flags[:whole]))
        self._bits = flags[whole:]

    def flush_bits(self) -> None:
        """Writes the last flags, with zeros after them."""
        self.append(np.packbits(self._bits))

    def append_ends(self, lengths: NDArray[np.int64], start: int) -> int:
        """Appends where each of consecutive things ends, the first beginning at `start`."""
        ends = start + np.cumsum(lengths)
        self.append(ends)
        return int(ends[-1]) if len(ends) else start

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())

    def record(self) -> dict[str, Any]:
        """What the manifest says about the file."""
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}


def assemble(
    staging: Path,
    pieces: Sequence[Sequence[Path]],
    tokenizer: Path,
    *,
    facts: dict[str, Any],
    dtype: str,
    masks: Sequence[bool],
    advance: Advance,
) -> None:
    """Writes a whole store into `staging`, which is made anew.

    Args:
        staging: a folder of our own.
        pieces: by part, the encoded pieces in order.
        tokenizer: folder of the saved tokenizer.
        facts: what else the manifest says; `parts` gets the counts of each part added.
        dtype: of the tokens.
        masks: by part, whether some of its tokens are only read.
        advance: told of each piece, twice.
    """
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    files: dict[str, Any] = {}
    shutil.copytree(tokenizer, staging / TOKENIZER_FOLDER)
    for path in sorted((staging / TOKENIZER_FOLDER).iterdir()):
        files[f"{TOKENIZER_FOLDER}/{path.name}"] = {
            "bytes": path.stat().st_size,
            "sha256": sha256_of(path),
        }
    counts = []
    for index, paths in enumerate(pieces):
        folder = staging / f"part-{index}"
        counts.append(
            {
                **facts["parts"][index],
                **_write_part(folder, paths, dtype=dtype, masks=masks[index], advance=advance),
            }
        )
        for split in SPLITS:
            files |= {
                f"part-{index}/{split}/{name}": record
                for name, record in counts[-1][split].pop("files").items()
            }
    manifest = {"format": FORMAT, **facts, "parts": counts, "dtype": dtype, "files": files}
    write_atomically(staging / MANIFEST_FILE, json.dumps(manifest, indent=2, sort_keys=True) + "\n")
    sync_folder(staging)


def _write_part(
    folder: Path, paths: Sequence[Path], *, dtype: str, masks: bool, advance: Advance
) -> dict[str, dict[str, Any]]:
    totals = {split: dict.fromkeys(("documents", "tokens", "bytes"), 0) for split in SPLITS}
    for path in paths:
        found = _piece(path)
        for split, total in totals.items():
            total["documents"] += len(found[f"{split}.lengths"])
            total["tokens"] += len(found[f"{split}.tokens"])
            total["bytes"] += int(found[f"{split}.sizes"].sum())
        advance(1)
    for split in SPLITS:
        (folder / split).mkdir(parents=True)
    return {
        split: {
            **total,
            "files": _write_split(
                folder / split,
                split,
                paths,
                total=total,
                dtype=dtype,
                masks=masks,
                advance=advance,
            ),
        }
        for split, total in totals.items()
    }


def _write_split(
    folder: Path,
    split: str,
    paths: Sequence[Path],
    *,
    total: dict[str, int],
    dtype: str,
    masks: bool,
    advance: Advance,
) -> dict[str, Any]:
    documents = total["documents"]
    with (
        _File(folder / "tokens.npy", dtype, total["tokens"]) as tokens,
        _File(folder / "offsets.npy", np.int64, documents + 1) as offsets,
        _File(folder / "bytes.npy", np.int64, documents) as sizes,
        _File(folder / "id_offsets.npy", np.int64, documents + 1) as id_offsets,
        _File(folder / "ids.txt") as id_text,
        _File(folder / "text.bin") as text,
        _File(folder / SCORED_FILE, np.uint8, -(-total["tokens"] // 8)) as scored,
    ):
        files = [tokens, offsets, sizes, id_offsets, id_text, text, scored]
        token_end = id_end = 0
        for file in (offsets, id_offsets):
            file.append(np.zeros(1, np.int64))
        for path in paths:
            found = _piece(path)
            get = {name: found[f"{split}.{name}"] for name in _ARRAYS}
            tokens.append(get["tokens"])
            sizes.append(get["sizes"])
            id_text.write(get["id_text"].tobytes())
            token_end = offsets.append_ends(get["lengths"], token_end)
            id_end = id_offsets.append_ends(get["id_lengths"], id_end)
            if split == "validation":
                text.write(found["validation.text"].tobytes())
            if masks:
                scored.append_bits(found[f"{split}.scored"])
            advance(0.5)
        scored.flush_bits()
    for file, kept in ((text, split == "validation"), (scored, masks)):
        if not kept:
            file.path.unlink()
            files.remove(file)
    sync_folder(folder)
    return {file.path.name: file.record() for file in files}


def _piece(path: Path) -> Arrays:
    found = read_arrays(path)
    if found is None:
        raise AssertionError(f"{path} was whole a moment ago")
    return found


def publish(staging: Path, target: Path) -> None:
    """Moves a finished store to its place, in one rename. A damaged one there is replaced."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(target, ignore_errors=True)
    staging.rename(target)
    sync_folder(target.parent)
