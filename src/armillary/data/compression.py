"""Compressed files as streams of what is in them: .gz, .bz2, .xz and .zst.

Files of several members or frames end to end are read to their end. Damage, and a file that ends
too early, is an `OSError` that says how far the content could be read and about where in the file
that is. Nothing is decompressed ahead of what is asked for, so that a file costs the memory of its
reader's buffers however much is in it.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, BinaryIO, Protocol, cast

from armillary.foundation.errors import missing_extra

SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
"""Ends of the names of files that are decompressed."""

_BUFFER_BYTES = 1 << 17
_ZSTD_INPUT_BYTES = 1 << 10
"""Taken in at once: a block of 128 KiB has 4 bytes at least, so they are 32 MiB at most."""
_ZSTD_WINDOW_BYTES = 1 << 31
"""The largest that zstd writes (--long=31). Memory is used only as far as there is content."""


def is_compressed(path: str) -> bool:
    """Whether a file's name says that it is compressed."""
    return PurePosixPath(path).suffix in SUFFIXES


def decompressed(file: BinaryIO, path: str) -> BinaryIO:
    """What is in a file, by its name's suffix; the file itself where that says nothing.

    Raises:
        UserError: a .zst, without the library for it.
        OSError: when it is read and damaged or cut short.
    """
    suffix = PurePosixPath(path).suffix
    openers: dict[str, Callable[[BinaryIO], _Inner]] = {
        ".gz": lambda file: gzip.GzipFile(fileobj=file),
        ".bz2": bz2.BZ2File,
        ".xz": lzma.LZMAFile,
        ".zst": _ZstdFile,
    }
    if suffix not in openers:
        return file
    content = _Content(file, openers[suffix](file), suffix)
    return cast(BinaryIO, io.BufferedReader(content, _BUFFER_BYTES))


class _Inner(Protocol):
    """What all libraries' files can do."""

    def read1(self, size: int, /) -> bytes: ...


class _Content(io.RawIOBase):
    """The content of a compressed file, whose libraries' errors become one kind, with places."""

    def __init__(self, file: BinaryIO, inner: _Inner, suffix: str) -> None:
        self._file, self._inner, self._suffix = file, inner, suffix
        self._read = 0

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`."""
        try:
            content = self._inner.read1(len(buffer))
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # of the disk or the network
            if not isinstance(error, OSError | EOFError | zlib.error | lzma.LZMAError | _Damaged):
                raise
            place = (
                f"after {self._read} bytes of content, near byte {self._file.tell()} of the file"
            )
            raise OSError(
                errno.EIO, f"not a whole {self._suffix} file: {error} ({place})"
            ) from error
        buffer[: len(content)] = content
        self._read += len(content)
        return len(content)

    def close(self) -> None:
        """Closes the file too."""
        super().close()
        self._file.close()


class _Damaged(Exception):
    """A .zst file is damaged; the library's own errors, which may not be installed, become this."""


class _ZstdFile:
    """Frames of Zstandard (RFC 8878), end to end. The library's own stream ends early in silence
    where a file does, which this one does not."""

    def __init__(self, file: BinaryIO) -> None:
        try:
            import zstandard
        except ImportError:
            raise missing_extra("zstd", "a .zst file") from None
        self._library = zstandard
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
        self._file = file
        self._frame: Any = None
        """The frame under way; None between two."""
        self._input = b""
        self._ready = memoryview(b"")

    def read1(self, size: int, /) -> bytes:
        """Up to `size` bytes; none at the end."""
        while not self._ready and self._advance():
            pass
        content, self._ready = self._ready[:size], self._ready[size:]
        return bytes(content)

    def _advance(self) -> bool:
        """Takes in a little more of the file; False at its end."""
        self._input = self._input or self._file.read(_ZSTD_INPUT_BYTES)
        if not self._input:
            if self._frame is not None:
                raise _Damaged("it ends inside a frame")
            return False
        if self._frame is None:
            self._frame = self._decompressor.decompressobj()
        try:
            self._ready = memoryview(self._frame.decompress(self._input))
        except self._library.ZstdError as error:
            raise _Damaged(str(error)) from error
        self._input = b""
        if self._frame.eof:
            self._input, self._frame = self._frame.unused_data, None
        return True
