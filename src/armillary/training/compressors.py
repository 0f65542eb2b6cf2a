"""What general-purpose compressors make of the held-out documents: a yardstick without a model."""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from armillary.foundation.progress import Advance

_AT_ONCE = 1 << 18
"""Bytes between two reports of progress: about an eighth of a second of `xz -9e`."""
_GZIP = 31  # of zlib's `wbits`: the largest window, in gzip's format


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressorBits:
    """Bits per byte of the held-out documents under compressors everyone has."""

    gzip_each: float
    """`gzip -9` of each document by itself, summed."""
    gzip_all: float
    """`gzip -9` of all documents, one after the other."""
    xz_all: float
    """`xz -9e` of all documents, one after the other."""


class _Compressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...

    def flush(self) -> bytes: ...


def measure_compressors(
    documents: Iterable[bytes], advance: Advance = lambda amount: None
) -> CompressorBits:
    """Compresses the documents, in the order given.

    Args:
        advance: hears of the bytes read, three times their number in all; may raise to end this.

    Raises:
        ValueError: there is not a single byte to compress.
    """
    contents = list(documents)
    total = sum(map(len, contents))
    if not total:
        raise ValueError("no bytes to compress")

    def compressed(compressor: _Compressor, texts: Iterable[bytes]) -> int:
        size = 0
        for text in texts:
            for first in range(0, len(text), _AT_ONCE):
                part = text[first : first + _AT_ONCE]
                size += len(compressor.compress(part))
                advance(len(part))
        return size + len(compressor.flush())

    def gzip() -> _Compressor:
        return zlib.compressobj(9, zlib.DEFLATED, _GZIP)

    xz = lzma.LZMACompressor(preset=9 | lzma.PRESET_EXTREME)
    return CompressorBits(
        gzip_each=8 * sum(compressed(gzip(), [text]) for text in contents) / total,
        gzip_all=8 * compressed(gzip(), contents) / total,
        xz_all=8 * compressed(xz, contents) / total,
    )
