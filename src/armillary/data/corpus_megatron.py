"""Corpora in the format of Megatron-LM: tokens in NAME.bin, where documents begin in NAME.idx.

The index, in little-endian numbers (class `_IndexWriter` of megatron/core/datasets/
indexed_dataset.py in NVIDIA/Megatron-LM; what its arrays mean: readme.md in the same folder):

    bytes [0, 9)    the letters MMIDIDX and two zeros
          [9, 17)   uint64, version: 1
          [17]      uint8, kind of the numbers in NAME.bin, see `_DTYPES`
          [18, 26)  uint64 S, number of sequences
          [26, 34)  uint64 D, number of documents and 1 more
    then  int32 [S]   tokens of each sequence
          int64 [S]   byte of NAME.bin at which each begins; they lie end to end
          int64 [D]   the sequence with which each document begins; the last is S

Where there are images, an int8 for each sequence comes after that; such files are refused.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from armillary.data.corpus import CorpusConfig, Document, Source
from armillary.data.files import FoundFile, facts_of, find_files, open_file, unreadable
from armillary.data.token_files import Damaged, Integers, TokenArray, open_array
from armillary.foundation.component import component
from armillary.foundation.errors import Problem, UserError

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_VERSION_BYTE, _DTYPE_BYTE = 9, 17
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_FRACTIONS = (6, 7)
"""float64 and float32 today; earlier versions had float32 at 6."""


@component("megatron")
@dataclass(frozen=True, kw_only=True, slots=True)
class Megatron(CorpusConfig):
    """Pairs of NAME.bin and NAME.idx, as Megatron-LM's tools write them: documents of tokens.

    The recipe's tokenizer must be the one that they were made with.
    """

    files: tuple[str, ...] = ()
    """Globs of NAME, with or without .idx: paths, or s3://, gs://, az:// or hf:// addresses."""

    def holds_tokens(self) -> bool:
        """See `CorpusConfig.holds_tokens`."""
        return True

    def sources(self) -> list[Source]:
        """See `CorpusConfig.sources`; of the indices, the first bytes are read."""
        patterns = [re.sub(r"\.(idx|bin|\*)$", "", pattern) + ".idx" for pattern in self.files]
        sources, problems = [], []
        for file in find_files(tuple(patterns)):
            try:
                sources += _sources_of(file)
            except Damaged as error:
                problems.append(error.problem)
            except OSError as error:
                problems.append(unreadable(file.path, error))
        if problems:
            raise UserError(problems)
        return sources

    def read(self, source: Source) -> Iterator[Document | Problem]:
        """See `CorpusConfig.read`; a source is a range of an index's documents."""
        name = source.name.removesuffix(".idx")
        try:
            with open_file(source.path) as file:
                index = _Index.of(source.path, file)
                with open_array(_tokens_of(source.path), index.dtype) as tokens:
                    spans = index.spans(source.start, source.end, tokens)
                    for number, (start, end) in enumerate(spans.tolist(), source.start):
                        yield Document(f"{name}:{number}", "", tokens.read(start, end))
        except Damaged as error:
            yield error.problem
        except OSError as error:
            yield unreadable(source.path, error)


def _tokens_of(index: str) -> str:
    return index.removesuffix(".idx") + ".bin"


def _sources_of(file: FoundFile) -> list[Source]:
    """Ranges of an index's documents with about equally many bytes of tokens."""
    with open_file(file.path) as opened:
        documents = _Index.of(file.path, opened).documents
    size, stamp, changed = facts_of(_tokens_of(file.path))
    pair = FoundFile(
        file.name,
        file.path,
        size=size,
        stamp=f"{file.stamp} {stamp}",
        changed_ns=max(file.changed_ns, changed),
    )
    ranges = pair.ranges()
    cuts = [documents * each // len(ranges) for each in range(len(ranges) + 1)]
    return [
        pair.source(start, end, each.size)
        for start, end, each in zip(cuts, cuts[1:], ranges, strict=False)
        if end > start
    ]


@dataclass(frozen=True, slots=True)
class _Index:
    """An open .idx file, its header looked through."""

    path: str
    file: BinaryIO
    dtype: str
    """Of the numbers in the .bin file."""
    sequences: int
    documents: int

    @classmethod
    def of(cls, path: str, file: BinaryIO) -> _Index:
        """Reads the header.

        Raises:
            Damaged: it is none, or the file's size does not fit it.
            OSError: it cannot be read.
        """
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        head = file.read(_HEADER.size)
        if head[: len(_MAGIC)] != _MAGIC[: len(head)]:
            raise Damaged(path, 0, f"it begins with {head[:9]!r}, not with {_MAGIC!r}")
        if len(head) < _HEADER.size:
            raise Damaged(path, len(head), f"it ends within its header of {_HEADER.size} bytes")
        _, version, code, sequences, ends = _HEADER.unpack(head)
        if version != 1:
            raise Damaged(path, _VERSION_BYTE, f"version {version}, where only 1 is known")
        if code not in _DTYPES:
            kinds = ", ".join(f"{code} ({dtype})" for code, dtype in _DTYPES.items())
            kind = "numbers with fractions" if code in _FRACTIONS else "unknown numbers"
            raise Damaged(path, _DTYPE_BYTE, f"code {code}, {kind}; token ids are {kinds}")
        needed = _HEADER.size + 12 * sequences + 8 * ends
        counts = f"{sequences} sequences and {ends} bounds of documents"
        if sequences and size == needed + sequences:
            raise Damaged(path, needed, "kinds of sequences: it holds more than text")
        if ends < 1 or size != needed:
            raise Damaged(path, min(size, needed), f"{counts} need {needed} bytes, it has {size}")
        return cls(path, file, _DTYPES[code], sequences, ends - 1)

    def spans(self, start: int, end: int, tokens: TokenArray) -> Integers:
        """[end - start, 2] where documents [start, end) begin and end in the tokens.

        Raises:
            Damaged: the index contradicts itself or its tokens.
            OSError: it cannot be read.
        """
        bounds = self._bounds(start, end)
        ends = self._ends(int(bounds[0]), int(bounds[-1]), tokens)
        edges = ends[bounds - bounds[0]] // tokens.dtype.itemsize
        return np.stack([edges[:-1], edges[1:]], axis=1)

    def _bounds(self, start: int, end: int) -> Integers:
        """[end - start + 1] the sequences with which some documents begin and the last one ends."""
        first_byte = _HEADER.size + 12 * self.sequences + 8 * start
        bounds = self._array("<i8", first_byte, end - start + 1)
        wrong = np.diff(bounds, prepend=0) < 0
        wrong |= (bounds < 0) | (bounds > self.sequences)
        wrong[0] |= start == 0 and bounds[0] != 0
        wrong[-1] |= end == self.documents and bounds[-1] != self.sequences
        for each in np.flatnonzero(wrong)[:1].tolist():
            words = f"document {start + each} begins with sequence {bounds[each]}, out of order"
            words += f" or not among {self.sequences}"
            raise Damaged(self.path, first_byte + 8 * each, words)
        return bounds

    def _ends(self, first: int, last: int, tokens: TokenArray) -> Integers:
        """[last - first + 1] byte at which sequence `first` begins, and at which each ends."""
        size = tokens.byte(tokens.count)
        before = min(first, 1)  # where the sequence before ends must be where this one begins
        lengths_byte = _HEADER.size + 4 * (first - before)
        begins_byte = _HEADER.size + 4 * self.sequences + 8 * (first - before)
        lengths = self._array("<i4", lengths_byte, last - first + before)
        begins = self._array("<i8", begins_byte, last - first + before)
        for each in np.flatnonzero(lengths < 0)[:1].tolist():
            words = f"a sequence of {lengths[each]} tokens"
            raise Damaged(self.path, lengths_byte + 4 * each, words)
        at = int(begins[0]) if before else 0
        if not 0 <= at <= size or at % tokens.dtype.itemsize:
            raise Damaged(self.path, begins_byte, f"a sequence at byte {at} of {size}")
        ends = at + np.cumsum(np.append(0, lengths)) * tokens.dtype.itemsize
        for each in np.flatnonzero(begins != ends[:-1])[:1].tolist():
            words = f"a sequence at byte {begins[each]} of the tokens; they lie end to end, so that"
            raise Damaged(self.path, begins_byte + 8 * each, f"{words} byte {ends[each]} is right")
        if ends[-1] > size:
            raise Damaged(tokens.path, size, f"it ends here, but sequences reach to {ends[-1]}")
        if last == self.sequences and ends[-1] != size:
            words = f"no sequence has what follows; the file has {size} bytes"
            raise Damaged(tokens.path, int(ends[-1]), words)
        return ends[before:]

    def _array(self, dtype: str, byte: int, count: int) -> Integers:
        array = TokenArray(self.path, self.file, byte, np.dtype(dtype), count)
        return array.read(0, count).astype(np.int64)
