"""What general-purpose compressors make of the held-out documents: a yardstick without a model."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressorBits:
    """Bits per byte of the held-out documents under compressors everyone has."""

    gzip_each: float
    """`gzip -9` of each document by itself, summed."""
    gzip_all: float
    """`gzip -9` of all documents, one after the other."""
    xz_all: float
    """`xz -9e` of all documents, one after the other."""


def measure_compressors(documents: Iterable[bytes]) -> CompressorBits:
    """Compresses the documents, in the order given.

    Raises:
        ValueError: there is not a single byte to compress.
    """
    contents = list(documents)
    everything = b"".join(contents)
    if not everything:
        raise ValueError("no bytes to compress")

    def bits_per_byte(compressed: int) -> float:
        return 8 * compressed / len(everything)

    return CompressorBits(
        gzip_each=bits_per_byte(sum(len(gzip.compress(text, 9, mtime=0)) for text in contents)),
        gzip_all=bits_per_byte(len(gzip.compress(everything, 9, mtime=0))),
        xz_all=bits_per_byte(len(lzma.compress(everything, preset=9 | lzma.PRESET_EXTREME))),
    )
