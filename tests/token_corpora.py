"""Writes corpora of tokens as other programs do, for the tests of their readers."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

MEGATRON_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}

Documents = Sequence[Sequence[Sequence[int]]]
"""Documents of sequences of token ids."""


def write_megatron(prefix: Path, documents: Documents, dtype: str = "uint16") -> Path:
    """PREFIX.bin and PREFIX.idx, from the description of the format; returns the prefix."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = np.array([len(each) for each in sequences], "<i4")
    item = np.dtype(dtype).itemsize
    begins = np.append(0, np.cumsum(lengths, dtype=np.int64))[:-1] * item
    bounds = np.append(0, np.cumsum([len(document) for document in documents], dtype=np.int64))
    flat = [token for sequence in sequences for token in sequence]
    prefix.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{prefix}.bin").write_bytes(np.array(flat, f"<{np.dtype(dtype).str[1:]}").tobytes())
    header = struct.pack("<9sQB", b"MMIDIDX\0\0", 1, MEGATRON_CODES[dtype])
    header += struct.pack("<QQ", len(lengths), len(bounds))
    arrays = [lengths, begins.astype("<i8"), bounds.astype("<i8")]
    Path(f"{prefix}.idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
    return prefix


def write_olmo(
    path: Path,
    documents: Sequence[Sequence[int]],
    dtype: str = "uint32",
    *,
    header: bool = False,
    bounds: bool = False,
) -> Path:
    """A flat file of ids, and what says where documents are if asked for; returns its path."""
    flat = np.array([token for document in documents for token in document], dtype)
    path.parent.mkdir(parents=True, exist_ok=True)
    if header:
        np.save(path, flat)
    else:
        path.write_bytes(flat.tobytes())
    if bounds:
        ends = np.cumsum([len(document) for document in documents]).tolist()
        lines = [f"{end - len(each)},{end}\n" for each, end in zip(documents, ends, strict=True)]
        Path(str(path).removesuffix(".npy") + ".csv.gz").write_bytes(
            gzip.compress("".join(lines).encode())
        )
    return path
