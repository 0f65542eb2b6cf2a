"""A finished token store: what is in its folder, opened and verified.

manifest.json                format, key, what it was made from, counts, sizes and SHA-256s
tokenizer/                   see `save_tokenizer`
part-0/train/tokens.npy      all documents' token ids end to end (uint16, or uint32)
             offsets.npy     where each document begins in tokens; int64 [N + 1]
             bytes.npy       UTF-8 bytes of each document's text; int64 [N]
             scored.npy      which tokens are predicted, a bit each (uint8 [ceil(T / 8)]); only
                             of corpora with masks, where bytes and text are those of scored tokens
             ids.txt         the documents' ids end to end
             id_offsets.npy  where each id begins; int64 [N + 1]
part-0/validation/...        the same, and text.bin: the held-out documents' text end to end
part-1/...                   further parts, for a mixture
"""

from __future__ import annotations

import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from armillary.data.splits import Bits, Split, TextTable
from armillary.data.tokenizer import Tokenizer, load_tokenizer
from armillary.foundation.errors import Problem, UserError
from armillary.foundation.files import sha256_of
from armillary.foundation.progress import NoProgress, Progress
from armillary.foundation.strict_json import parse_json

FORMAT = 1
MANIFEST_FILE = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
SCORED_FILE = "scored.npy"
SPLITS: tuple[Literal["train", "validation"], ...] = ("train", "validation")


@dataclass(frozen=True)
class TokenStore:
    """A corpus as tokens on disk; one train and one validation split for each of its parts."""

    folder: Path
    manifest: dict[str, Any]
    train: tuple[Split, ...]
    """By part; one unless the corpus is a mixture."""
    validation: tuple[Split, ...]
    weights: tuple[float, ...]
    """By part, as the recipe that opened the store says; not part of the store."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all that the store was made from: documents, tokenizer, split, BOS and EOS."""
        key: str = self.manifest["key"]
        return key

    @property
    def corpus_fingerprint(self) -> str:
        """SHA-256 over the documents' ids and contents, whatever the tokenizer."""
        fingerprint: str = self.manifest["corpus_fingerprint"]
        return fingerprint

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the store."""
        return load_tokenizer(self.folder / TOKENIZER_FOLDER)

    @property
    def splits(self) -> dict[str, Split]:
        """`train` and `validation` of a store with one part."""
        assert len(self.train) == 1, "a mixture has several parts: use .train and .validation"
        return {"train": self.train[0], "validation": self.validation[0]}


def open_store(folder: Path | str, weights: tuple[float, ...] | None = None) -> TokenStore:
    """Opens a finished store; tokens are mapped, not read.

    Raises:
        UserError: the folder is no token store, of another format, or files are missing or cut.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    problems = [
        Problem(f"{folder / name} is missing or cut short", fix="build the store again")
        for name, found in manifest["files"].items()
        if _size(folder / name) != found["bytes"]
    ]
    if problems:
        raise UserError(problems)
    parts = [folder / f"part-{index}" for index in range(len(manifest["parts"]))]
    first_token_bytes = None if manifest["made_from"]["bos"] else _token_bytes_of(folder)
    return TokenStore(
        folder=folder,
        manifest=manifest,
        train=tuple(_open_split(part / "train", first_token_bytes) for part in parts),
        validation=tuple(_open_split(part / "validation", first_token_bytes) for part in parts),
        weights=weights or (1.0,) * len(parts),
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a store.

    Raises:
        UserError: the folder is no token store, or of another format.
    """
    path = folder / MANIFEST_FILE
    try:
        found = parse_json(path.read_bytes())
    except OSError as error:
        raise UserError(
            Problem(
                f"{folder} is not a token store: {path.name}: {error.strerror}",
                "a folder that `armillary data build` made",
            )
        ) from error
    except ValueError as error:
        raise UserError(Problem(f"{path} is damaged: {error}")) from error
    if (
        not isinstance(found, dict)
        or not {"format", "key", "made_from", "parts", "files"} <= found.keys()
    ):
        raise UserError(Problem(f"{path} is not the manifest of a token store"))
    if found["format"] == FORMAT and not _is_whole(found):
        raise UserError(Problem(f"{path} is damaged: its fields are not what they should be"))
    if found["format"] != FORMAT:
        raise UserError(
            Problem(
                f"{folder} has format {found['format']}",
                f"format {FORMAT}",
                "build it again with this version",
            )
        )
    return found


def _is_whole(manifest: dict[str, Any]) -> bool:
    """Whether the fields that are read later are of the kinds that they should be."""
    files, made_from = manifest["files"], manifest["made_from"]
    return (
        isinstance(manifest["key"], str)
        and isinstance(manifest["parts"], list)
        and isinstance(made_from, dict)
        and isinstance(made_from.get("bos"), bool)
        and isinstance(files, dict)
        and all(
            not Path(name).is_absolute()
            and ".." not in Path(name).parts
            and "\0" not in name
            and isinstance(entry, dict)
            and type(entry.get("bytes")) is int
            and isinstance(entry.get("sha256"), str)
            for name, entry in files.items()
        )
    )


def verify(folder: Path | str, progress: Progress | None = None) -> list[Problem]:
    """Compares every file of a store with the manifest's sizes and SHA-256s; [] when all agree."""
    folder = Path(folder)
    files = read_manifest(folder)["files"]
    problems = []
    total = sum(found["bytes"] for found in files.values())
    with (progress or NoProgress()).task("verifying", total, "B") as advance:
        for name, found in sorted(files.items()):
            size = _size(folder / name)
            if size is None:
                problems.append(Problem(f"{folder / name} is missing"))
            elif size != found["bytes"]:
                problems.append(
                    Problem(f"{folder / name} has {size} bytes", f"{found['bytes']} bytes")
                )
            elif (digest := sha256_of(folder / name)) != found["sha256"]:
                problems.append(
                    Problem(
                        f"{folder / name} has changed: SHA-256 {digest[:12]}...",
                        f"{found['sha256'][:12]}...",
                    )
                )
            advance(found["bytes"])
    return problems


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _token_bytes_of(folder: Path) -> Callable[[int], int]:
    """Bytes that a token of the store's tokenizer stands for; it is read at the first question."""
    tokenizer = cache(lambda: load_tokenizer(folder / TOKENIZER_FOLDER))
    return lambda token: tokenizer().byte_count(token)


def _open_split(folder: Path, first_token_bytes: Callable[[int], int] | None) -> Split:
    text = folder / "text.bin"
    tokens, offsets = _load(folder / "tokens.npy"), _load(folder / "offsets.npy")
    sizes, id_offsets = _load(folder / "bytes.npy"), _load(folder / "id_offsets.npy")
    identifiers = _map_bytes(folder / "ids.txt")
    bits = _load(folder / SCORED_FILE) if (folder / SCORED_FILE).exists() else None
    if (
        tokens.dtype.kind != "u"
        or not len(sizes) + 1 == len(offsets) == len(id_offsets)
        or (offsets[0], offsets[-1]) != (0, len(tokens))
        or (id_offsets[0], id_offsets[-1]) != (0, len(identifiers))
        or (bits is not None and (bits.dtype != np.uint8 or len(bits) != -(-len(tokens) // 8)))
    ):
        raise _damaged(folder, "its files do not fit together")
    return Split(
        tokens=tokens,
        document_offsets=offsets,
        document_bytes=sizes,
        ids=TextTable(identifiers, id_offsets),
        text=text if text.exists() else None,
        first_token_bytes=first_token_bytes,
        scored=None if bits is None else Bits(bits, len(tokens)),
    )


def _load(path: Path) -> NDArray[Any]:
    """A list of whole numbers, mapped."""
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except _UNREADABLE as error:
        raise _damaged(path, str(error).partition("\n")[0]) from error
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu" or found.ndim != 1:
        raise _damaged(path, "no list of whole numbers")
    return found


def _map_bytes(path: Path) -> NDArray[np.uint8]:
    try:
        empty = path.stat().st_size == 0
        return np.zeros(0, np.uint8) if empty else np.memmap(path, np.uint8, mode="r")
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from error


# What `np.load` raises for a header that is none: it is a literal of Python, though never run.
_UNREADABLE = (
    *(OSError, EOFError, ValueError, TypeError, OverflowError, MemoryError, RecursionError),
    *(SyntaxError, tokenize.TokenError),
)


def _damaged(path: Path, why: str) -> UserError:
    return UserError(Problem(f"{path} is damaged: {why}", fix="build the store again"))
