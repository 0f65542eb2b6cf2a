"""Files in object stores and on the Hugging Face hub: found by globs, and read in ranges."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, TypeVar

from armillary.foundation.errors import Problem, UserError, nearest
from armillary.foundation.patience import insist
from armillary.foundation.secrets import holds_a_secret, without_secrets
from armillary.foundation.stores import CREDENTIALS, OBJECT_STORES, connect

T = TypeVar("T")

KINDS = (*OBJECT_STORES, "hf")
"""What addresses of files may begin with."""

RETRY_SECONDS = 60.0
"""How long a request is made again while a store has trouble."""
LOOK_UP_SECONDS = 8.0
"""...and one that looks for files, before there is any work that trouble could undo."""

_REQUEST_BYTES = 1 << 22
"""Bytes asked for in one request, unless more is wanted at once."""
_LARGEST_REQUEST_BYTES = 1 << 26

_MARKS = ("ETag", "etag", "md5Hash", "generation", "blob_id", "content_settings")
"""What stores tell versions of an object apart by, other than its size and time."""
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "created")
_NEVER_SETTLED = 1 << 63
"""A time of change for what cannot be told to be unchanged."""

Facts = tuple[int, str, int]
"""A file's size in bytes, stamp, and time of change (see `Source`)."""


def find_remote(pattern: str) -> dict[str, Facts]:
    """The files at an address, or that a glob of one fits: address to facts.

    Raises:
        UserError: the address is of no known kind or holds a password, its library is not
            installed, or the store does not answer or does not let us in.
    """
    kind, _, key = pattern.partition("://")
    _check(pattern, kind)
    try:
        found = insist(lambda: _matches(_store(kind), key), LOOK_UP_SECONDS)
    except OSError as error:
        raise UserError(_no_answer(pattern, kind, error)) from error
    return {
        f"{kind}://{name}": _facts(info)
        for name, info in sorted(found.items())
        if info["type"] == "file"
    }


def _matches(store: Any, key: str) -> dict[str, dict[str, Any]]:
    if any(sign in key for sign in "*?["):
        matches: dict[str, dict[str, Any]] = store.glob(key, detail=True)
        return matches
    try:
        return {key: store.info(key)}
    except FileNotFoundError:
        return {}


def _check(pattern: str, kind: str) -> None:
    if holds_a_secret(pattern):
        raise UserError(
            Problem(
                f"data.corpus.files: {without_secrets(pattern)!r} holds a user name or a password,"
                " which would end up in logs and recipes",
                "an address without them",
                "leave it out: credentials are read from the environment, as the store's own tools"
                " read them",
            )
        )
    if kind not in KINDS:
        close = nearest(kind, KINDS)
        raise UserError(
            Problem(
                f"data.corpus.files: {pattern!r} is of no kind of place that is known",
                "globs of paths, or of addresses: " + ", ".join(f"{kind}://" for kind in KINDS),
                pattern.replace(kind, close, 1) if close else None,
            )
        )


def _no_answer(pattern: str, kind: str, error: OSError) -> Problem:
    message = f"data.corpus.files: {pattern!r} cannot be looked up: {error.strerror or error}"
    if isinstance(error, PermissionError):
        return Problem(
            message,
            "credentials that the store takes",
            f"credentials from the environment: {CREDENTIALS[kind]}",
        )
    return Problem(message, "a store that answers", "look at its address and at the network")


def _facts(info: dict[str, Any]) -> Facts:
    size = int(info["size"] or 0)
    marks = [str(info[mark]) for mark in _MARKS if info.get(mark) is not None]
    times = [info[time] for time in _TIMES if info.get(time) is not None]
    stamp = " ".join([str(size), *marks, *map(str, times)])
    if marks:
        return size, stamp, 0
    moments = [time for time in times if isinstance(time, datetime)]
    changed = max((int(time.timestamp() * 1e9) for time in moments), default=_NEVER_SETTLED)
    return size, stamp, changed


class RemoteFile(io.RawIOBase):
    """One file, read by ranges; a request that fails, or brings too little, is made again.

    Args:
        address: such as s3://bucket/key.

    Raises:
        OSError: the file is not there, or the store does not answer; also while it is read.
        UserError: the store's library is not installed.
    """

    def __init__(self, address: str) -> None:
        kind, _, self._key = address.partition("://")
        self._store = _store(kind)
        self._size = int(_ask(lambda: self._store.info(self._key))["size"])
        self._at = 0

    def buffered(self) -> io.BufferedReader:
        """The file, asked for in blocks that are worth a request."""
        return io.BufferedReader(self, min(_REQUEST_BYTES, max(self._size, 1)))

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def seekable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def tell(self) -> int:
        """See `io.RawIOBase`."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See `io.RawIOBase`."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, "a position before the file")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`."""
        count = max(0, min(len(buffer), _LARGEST_REQUEST_BYTES, self._size - self._at))
        if count:
            buffer[:count] = _ask(lambda: self._range(self._at, count))
            self._at += count
        return count

    def readall(self) -> bytes:
        """See `io.RawIOBase`."""
        parts = []
        while part := self.read(_LARGEST_REQUEST_BYTES):
            parts.append(part)
        return b"".join(parts)

    def _range(self, start: int, count: int) -> bytes:
        content: bytes = self._store.cat_file(self._key, start=start, end=start + count)
        if len(content) != count:
            raise OSError(errno.EIO, f"{len(content)} of the {count} bytes from {start} on came")
        return content


@lru_cache(maxsize=8)
def _store(kind: str) -> Any:
    return connect(kind)


def _ask(request: Callable[[], T]) -> T:
    return insist(request, RETRY_SECONDS)
