"""Corpora as OLMo-core and Dolma's tools write them: flat files of token ids, called .npy.

One file holds the ids of many documents end to end, each with its EOS, as little-endian numbers
without any header in spite of its name (docs/source/guides/data_loading.rst in allenai/OLMo-core;
`np.memmap` writes none). Beside NAME.npy there may be NAME.csv.gz, with a line `start,end` for each
document, in tokens; further columns may follow (`iter_document_indices` in
src/olmo_core/data/utils.py there). Files with NumPy's header are read as well.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armillary.data.corpus import CorpusConfig, Document, Source
from armillary.data.files import (
    FoundFile,
    find_files,
    folder_facts,
    open_content,
    unreadable,
)
from armillary.data.token_files import Damaged, Integers, TokenArray, open_array
from armillary.foundation.component import component
from armillary.foundation.errors import Problem, UserError

DTYPES = ("uint8", "uint16", "uint32", "uint64")
"""What OLMo-core chooses among, by the size of the vocabulary."""

LONGEST_DOCUMENT = 1 << 28
"""Tokens; without an EOS for so long, `eos_id` or `dtype` is wrong."""

_BLOCK = 1 << 18
"""Tokens read at once in search of an EOS."""
_LONGEST_LINE = 1 << 16
_MOST_EMPTY = 1 << 20
"""Documents without tokens that a list of bounds may hold."""


@component("olmo")
@dataclass(frozen=True, kw_only=True, slots=True)
class Olmo(CorpusConfig):
    """Flat files of token ids (.npy), as OLMo-core and Dolma's tools write them.

    Documents are as NAME.csv.gz beside NAME.npy says; where there is none, each ends with an EOS.
    The recipe's tokenizer must be the one that they were made with.
    """

    files: tuple[str, ...] = ()
    """Globs of paths, or of s3://, gs://, az:// or hf:// addresses; ** also matches folders."""
    dtype: str = "uint32"
    """Kind of the numbers in files without NumPy's header: uint8, uint16, uint32 or uint64."""
    eos_id: int = -1
    """Token id that ends a document where no .csv.gz says so; -1: there must be one."""

    def holds_tokens(self) -> bool:
        """See `CorpusConfig.holds_tokens`."""
        return True

    def problems(self) -> list[Problem]:
        """See `CorpusConfig.problems`."""
        problems = []
        if self.dtype not in DTYPES:
            problems.append(Problem(f"data.corpus.dtype = {self.dtype!r}", ", ".join(DTYPES)))
        if self.eos_id < -1:
            problems.append(Problem(f"data.corpus.eos_id = {self.eos_id}", "a token id, or -1"))
        return problems

    def sources(self) -> list[Source]:
        """See `CorpusConfig.sources`; no file is opened."""
        sources, problems = [], []
        files = find_files(self.files)
        beside = folder_facts([_bounds_path(file.path) for file in files])
        for file in files:
            found = beside.get(_bounds_path(file.path))
            if found is None and self.eos_id < 0:
                problems.append(_no_bounds(file.path))
            _, stamp, changed = found or (0, "", 0)
            whole = FoundFile(
                file.name,
                file.path,
                size=file.size,
                stamp=f"{file.stamp} {stamp}".strip(),
                changed_ns=max(file.changed_ns, changed),
            )
            sources += whole.ranges()
        if problems:
            raise UserError(problems)
        return sources

    def read(self, source: Source) -> Iterator[Document | Problem]:
        """See `CorpusConfig.read`: the documents that begin in a range of bytes."""
        try:
            with open_array(source.path, self.dtype) as tokens:
                start, end = (_first_at(tokens, byte) for byte in (source.start, source.end))
                if source.end >= tokens.byte(tokens.count):
                    end = tokens.count + 1  # documents without tokens may stand at the very end
                bounds = _bounds_of(_bounds_path(source.path), source.stamp, tokens.count)
                for at, ids in (
                    _until_eos(tokens, start, end, self.eos_id)
                    if bounds is None
                    else _within_bounds(tokens, start, end, bounds)
                ):
                    yield Document(f"{source.name}@{at}", "", ids)
        except Damaged as error:
            yield error.problem
        except OSError as error:
            yield unreadable(source.path, error)


def _first_at(tokens: TokenArray, byte: int) -> int:
    """The first token that begins at a byte of the file or after it."""
    return max(0, -(-(byte - tokens.first_byte) // tokens.dtype.itemsize))


def _until_eos(
    tokens: TokenArray, start: int, end: int, eos_id: int
) -> Iterator[tuple[int, NDArray[Any]]]:
    """The documents that begin at tokens [start, end), and where; the last may lack its EOS."""
    if start >= end:
        return
    at = max(start - 1, 0)  # where the document under way begins, or before `start`
    held: list[NDArray[Any]] = []
    for begin in range(at, tokens.count, _BLOCK):
        block = tokens.read(begin, min(begin + _BLOCK, tokens.count))
        used = 0
        for cut in (np.flatnonzero(block == eos_id) + 1).tolist():
            if at >= start:
                yield at, np.concatenate([*held, block[used:cut]])
            at, held, used = begin + cut, [], cut
            if at >= end:
                return
        held.append(block[used:])
        if begin + len(block) - at > LONGEST_DOCUMENT:
            words = f"no {eos_id} for {LONGEST_DOCUMENT} tokens: is data.corpus.eos_id right?"
            raise Damaged(tokens.path, tokens.byte(at), words)
    if start <= at < tokens.count:
        yield at, np.concatenate(held)


def _within_bounds(
    tokens: TokenArray, start: int, end: int, bounds: Integers
) -> Iterator[tuple[int, NDArray[Any]]]:
    """The documents that begin at tokens [start, end) as is written beside them, and where."""
    first, last = np.searchsorted(bounds[:, 0], [start, end])
    for begins, ends in bounds[first:last].tolist():
        yield begins, tokens.read(begins, ends)


def _bounds_path(path: str) -> str:
    return path.removesuffix(".npy") + ".csv.gz"


def _no_bounds(path: str) -> Problem:
    beside = _bounds_path(path).rpartition("/")[2]
    return Problem(
        f"{path} has no {beside} beside it, and data.corpus.eos_id is not given",
        "one of the two, which say where documents end",
        "--data.corpus.eos-id N, the tokenizer's EOS",
    )


@lru_cache(maxsize=4)
def _bounds_of(path: str, stamp: str, count: int) -> Integers | None:
    """[N, 2] first and one past the last token of each document; None where no file says so.

    Args:
        path: of the .csv.gz.
        stamp: of the files, so that one that has changed is read again.
        count: tokens beside it.

    Raises:
        Damaged: it says what cannot be.
        OSError: it cannot be read.
    """
    try:
        file = open_content(path)
    except FileNotFoundError:
        return None
    bounds = array("q")  # numbers alone: there may be many documents
    byte = last = 0
    with file:
        while line := file.readline(_LONGEST_LINE):
            fields = line.rstrip().split(b",", 2)
            numbers = [int(each) for each in fields[:2] if each.isdigit() and len(each) < 20]
            if len(numbers) != 2 or not last <= numbers[0] <= numbers[1] <= count:
                words = f"of its content: {line[:60]!r}, not `start,end`, in order, in {count}"
                raise Damaged(path, byte, f"{words} tokens")
            if len(bounds) // 2 > count + _MOST_EMPTY:
                raise Damaged(path, byte, f"of its content: more documents than {count} tokens")
            bounds.extend(numbers)
            byte, last = byte + len(line), numbers[1]
    return np.array(bounds, np.int64).reshape(-1, 2)
