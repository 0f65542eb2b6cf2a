"""Pieces of a corpus: the unit of work that is shared out, written atomically and resumed.

A piece is a run of consecutive sources. Where it is cut depends on the corpus alone. It is read
twice: *scanned* (ids, sizes and hashes of its documents: the corpus's fingerprint), then *encoded*
(tokens). Both results are files that begin with their own SHA-256, so that a torn one is redone.
"""

from __future__ import annotations

import hashlib
import io
import uuid
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armillary.data.corpus import CorpusConfig, Document, Source
from armillary.data.encoding import Encoding, encode_documents
from armillary.data.tokenizer import Tokenizer, load_tokenizer
from armillary.foundation.errors import Problem, RunError

PIECE_BYTES = 1 << 20
"""Least size of a piece, in bytes."""
PIECES_PER_CORPUS = 4096
"""About how many pieces a corpus is cut into at most."""
MOST_PROBLEMS = 20
"""A piece stops being read once it has shown this many problems."""

Arrays = dict[str, NDArray[Any]]


def cut(sources: Sequence[Source]) -> list[tuple[int, int]]:
    """Ranges [first, last) of consecutive sources that make up the pieces."""
    total = sum(source.size for source in sources)
    least = max(PIECE_BYTES, -(-total // PIECES_PER_CORPUS))
    ranges, first, size = [], 0, 0
    for index, source in enumerate(sources):
        size += source.size
        if size >= least:
            ranges.append((first, index + 1))
            first, size = index + 1, 0
    if first < len(sources):
        ranges.append((first, len(sources)))
    return ranges


# Held out or not -----------------------------------------------------------------------------


def hash_of_id(identifier: bytes) -> int:
    """The first 64 bits of the SHA-256 of a document's id: decides what is held out."""
    return int.from_bytes(hashlib.sha256(identifier).digest()[:8], "big")


def held_out_below(fraction: float) -> int:
    """Documents whose hash lies below this are held out."""
    return min(int(fraction * 2.0**64), 2**64 - 1)


# Scanning ------------------------------------------------------------------------------------


def scan_piece(corpus: CorpusConfig, sources: Sequence[Source], path: Path) -> list[Problem]:
    """Reads a piece and writes what is known of its N documents to `path`, or tells its problems.

    The file holds `id_text` (ids end to end, UTF-8), `id_lengths` [N], `sizes` [N] (UTF-8 bytes of
    each text), `hashes` [N] (see `hash_of_id`), `digests` [N * 32] (SHA-256 of `content`),
    `per_source` (documents of each source) and `empty` (documents without text, left out).
    """
    problems: list[Problem] = []
    ids: list[bytes] = []
    digests: list[bytes] = []
    sizes, hashes, per_source, empty = [], [], [], 0
    for source in sources:
        before = len(ids)
        for item in corpus.read(source):
            if isinstance(item, Problem):
                problems.append(item)
                if len(problems) >= MOST_PROBLEMS:
                    return problems
                continue
            if item.is_empty:
                empty += 1
                continue
            content = item.content()
            identifier = item.id.encode("utf-8", "surrogateescape")
            ids.append(identifier)
            sizes.append(len(item.text.encode("utf-8")))
            group = item.group.encode("utf-8", "surrogateescape")
            hashes.append(hash_of_id(group or identifier))
            digests.append(hashlib.sha256(content).digest())
        per_source.append(len(ids) - before)
    if problems:
        return problems
    write_arrays(
        path,
        {
            "id_text": np.frombuffer(b"".join(ids), np.uint8),
            "id_lengths": np.array([len(identifier) for identifier in ids], np.int64),
            "sizes": np.array(sizes, np.int64),
            "hashes": np.array(hashes, np.uint64),
            "digests": np.frombuffer(b"".join(digests), np.uint8),
            "per_source": np.array(per_source, np.int64),
            "empty": np.array([empty], np.int64),
        },
    )
    return []


# Encoding ------------------------------------------------------------------------------------


def encode_piece(
    corpus: CorpusConfig, sources: Sequence[Source], scan: Path, how: Encoding, path: Path
) -> None:
    """Reads a piece again and writes its tokens, by split, to `path`.

    Raises:
        RunError: the corpus is no longer what was scanned.
    """
    scanned = read_arrays(scan)
    assert scanned is not None
    held_out = scanned["hashes"] < np.uint64(how.held_out_below)
    documents = list(_documents_as_scanned(corpus, sources, scanned))
    encoded = encode_documents(documents, _tokenizer(how.tokenizer_folder), how)
    arrays: Arrays = {}
    for split, chosen in (("train", ~held_out), ("validation", held_out)):
        which = np.flatnonzero(chosen).tolist()
        tokens = [encoded[i].tokens for i in which]
        arrays |= {
            f"{split}.tokens": np.concatenate([np.zeros(0, how.dtype), *tokens]),
            f"{split}.lengths": np.array([len(each) for each in tokens], np.int64),
            f"{split}.sizes": np.array([len(encoded[i].text) for i in which], np.int64),
            f"{split}.id_lengths": scanned["id_lengths"][chosen],
            f"{split}.id_text": _chosen_text(scanned["id_text"], scanned["id_lengths"], which),
        }
        if how.masks:
            flags = [encoded[i].scored for i in which]
            arrays[f"{split}.scored"] = np.concatenate([np.zeros(0, np.bool_), *flags])
    texts = [encoded[i].text for i in np.flatnonzero(held_out).tolist()]
    arrays["validation.text"] = np.frombuffer(b"".join(texts), np.uint8)
    write_arrays(path, arrays)


def _documents_as_scanned(
    corpus: CorpusConfig, sources: Sequence[Source], scanned: Arrays
) -> Iterator[Document]:
    expected = scanned["digests"].tobytes()
    count = len(scanned["sizes"])
    index = 0
    for source in sources:
        for item in corpus.read(source):
            if isinstance(item, Problem):
                raise changed_while_building(source)
            if item.is_empty:
                continue
            digest = hashlib.sha256(item.content()).digest()
            if index >= count or digest != expected[32 * index : 32 * index + 32]:
                raise changed_while_building(source)
            yield item
            index += 1
    if index != count:
        raise changed_while_building(sources[-1])


def changed_while_building(source: Source) -> RunError:
    """The error of a corpus that someone writes to."""
    return RunError(
        Problem(
            f"{source.path or source.name} changed while the corpus was being built",
            "files that nobody writes to meanwhile",
            "run the command again",
        )
    )


@lru_cache(maxsize=1)
def _tokenizer(folder: str) -> Tokenizer:
    return load_tokenizer(Path(folder))


def _chosen_text(
    text: NDArray[np.uint8], lengths: NDArray[np.int64], which: list[int]
) -> NDArray[np.uint8]:
    ends = np.cumsum(lengths)
    parts = [text[ends[i] - lengths[i] : ends[i]] for i in which]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint8)


# Piece files ---------------------------------------------------------------------------------


def write_arrays(path: Path, arrays: Arrays) -> None:
    """Writes named arrays as one file: 32 bytes of SHA-256, then an uncompressed npz."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]  # the stub mixes arrays and options
    content = buffer.getvalue()
    _replace(path, hashlib.sha256(content).digest() + content)


def _replace(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all. Not synced: after a power cut its SHA-256 tells."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_arrays(path: Path) -> Arrays | None:
    """The named arrays, or None when the file is missing or damaged."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if hashlib.sha256(content[32:]).digest() != content[:32]:
        return None
    with np.load(io.BytesIO(content[32:]), allow_pickle=False) as found:
        return dict(found)
