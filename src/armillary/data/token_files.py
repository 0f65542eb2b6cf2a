"""Arrays of token ids in files, in any place: read from the middle, and never trusted."""

from __future__ import annotations

import io
import struct
import tokenize
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from armillary.data.files import open_file
from armillary.foundation.errors import Problem

Integers = NDArray[np.int64]

_NUMPY_MAGIC = b"\x93NUMPY"
_LONGEST_NUMPY_HEADER = 1 << 14


class Damaged(Exception):
    """A file is not what its format says, from some byte on."""

    def __init__(self, path: str, byte: int, words: str) -> None:
        self.problem = Problem(f"{path}: byte {byte}: {words}", fix="write or fetch the file again")
        super().__init__(self.problem.message)


@dataclass(frozen=True, slots=True)
class TokenArray:
    """Numbers of one kind end to end, from a byte of an open file on."""

    path: str
    file: BinaryIO
    first_byte: int
    dtype: np.dtype[Any]
    count: int

    def byte(self, index: int) -> int:
        """Where a number begins in the file."""
        return self.first_byte + index * self.dtype.itemsize

    def read(self, start: int, end: int) -> NDArray[Any]:
        """Numbers [start, end).

        Raises:
            Damaged: the file ends before.
            OSError: it cannot be read.
        """
        assert 0 <= start <= end <= self.count
        size = (end - start) * self.dtype.itemsize
        self.file.seek(self.byte(start))
        content = self.file.read(size)
        if len(content) != size:
            raise Damaged(self.path, self.byte(start) + len(content), "it ends here meanwhile")
        return np.frombuffer(content, self.dtype)


@contextmanager
def open_array(path: str, dtype: str) -> Iterator[TokenArray]:
    """A file of numbers: with NumPy's header, which says what they are, or without one.

    Args:
        path: of the file, or its address.
        dtype: of numbers without a header.

    Raises:
        Damaged: it holds no list of whole numbers, or its size does not fit them.
        OSError: it cannot be read.
    """
    with open_file(path) as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        head = file.read(_LONGEST_NUMPY_HEADER)
        if not head.startswith(_NUMPY_MAGIC):
            kind = np.dtype(dtype).newbyteorder("<")
            count, rest = divmod(size, kind.itemsize)
            if rest:
                words = f"it ends within a number: {dtype} has {kind.itemsize} bytes"
                raise Damaged(path, size - rest, words)
            yield TokenArray(path, file, 0, kind, count)
            return
        kind, count, first = _parse_header(path, head)
        if size != first + count * kind.itemsize:
            words = f"it ends here, but its header tells of {count} numbers of {kind} from {first}"
            raise Damaged(path, size, words)
        yield TokenArray(path, file, first, kind, count)


def _parse_header(path: str, head: bytes) -> tuple[np.dtype[Any], int, int]:
    """(kind, count, first byte) of the numbers in an .npy file.

    (Format versions 1.0 and 2.0: https://numpy.org/doc/stable/reference/generated/
    numpy.lib.format.html; the header is a literal of Python, which is parsed and never run.)
    """
    stream = io.BytesIO(head)
    try:
        with warnings.catch_warnings(action="ignore"):  # of versions of Python, which do not matter
            version = np.lib.format.read_magic(stream)
            if version == (1, 0):
                shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
            elif version == (2, 0):
                shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
            else:
                raise ValueError(f"a version of the .npy format that is not known, {version}")
    except _NOT_NUMPY as error:
        words = str(error).partition("\n")[0] or type(error).__name__
        raise Damaged(path, 0, f"its NumPy header cannot be read: {words}") from error
    if dtype.kind not in "iu" or len(shape) != 1 or shape[0] < 0:
        words = f"it holds {dtype} of shape {shape}, not one list of whole numbers"
        raise Damaged(path, 0, words)
    return dtype, shape[0], stream.tell()


_NOT_NUMPY = (
    *(EOFError, ValueError, TypeError, OverflowError, MemoryError, RecursionError, KeyError),
    *(SyntaxError, tokenize.TokenError, struct.error, AttributeError, IndexError),
)
"""What NumPy raises for a header that is none."""
