"""A folder of checkpoints in an object store, through fsspec. Imports no torch.

    s3://bucket/run/
      claim.json                             which run writes here, see `fence`
      step-00000020/manifest.json            put last; without it there is no checkpoint
      step-00000020/<attempt>/...            the files that it names

Nothing can be renamed in an object store, and nothing need be: each attempt at a checkpoint has a
folder of its own, so that writers which are dead, or only thought to be, never mix files, and one
request makes the manifest appear.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from armillary.checkpoint.places.fence import Fence
from armillary.checkpoint.places.place import ASIDE, MANIFEST, Draft, Written, inside, unique
from armillary.foundation.patience import insist
from armillary.foundation.progress import mark
from armillary.foundation.stores import connect
from armillary.foundation.strict_json import parse_json

T = TypeVar("T")

PART_BYTES = 1 << 24
"""Bytes sent, or asked for, in one request."""

_THREADS = 8


class RemotePlace:
    """See `Place`.

    Args:
        address: such as s3://bucket/folder.
        retry_seconds: how long a request is made again, in seconds.
        request_seconds: how long a request may be silent, in seconds; for S3.

    Raises:
        UserError: the library for this kind of store is not installed.
    """

    file_bytes = 1 << 28
    local: Path | None = None

    def __init__(
        self, address: str, retry_seconds: float = 60, request_seconds: float = 60
    ) -> None:
        self.address = address
        self.hurried = False
        self.retry_seconds = retry_seconds
        kind, _, self._root = address.partition("://")
        self._store = connect(kind, request_seconds)
        self._fence = Fence(address, self.read, self._put)

    def names(self, under: str = "") -> list[str]:
        """See `Place.names`."""
        return sorted(name for name, _ in self._children(under))

    def folders(self, under: str = "") -> list[str]:
        """See `Place.folders`: those with a manifest, as drafts lie where they will stay."""
        named = sorted(name for name, is_folder in self._children(under) if is_folder)
        above = f"{under}/" if under else ""
        with ThreadPoolExecutor(_THREADS) as pool:
            finished = pool.map(lambda name: self._exists(f"{above}{name}/{MANIFEST}"), named)
            return [name for name, yes in zip(named, finished, strict=True) if yes]

    def files(self, under: str = "") -> dict[str, int]:
        """See `Place.files`."""
        return {name: int(info["size"]) for name, info in self._find(under)}

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> Written:
        """See `Place.write`; large files go in parts, and one that fails is begun again."""
        key = self._key(name)

        def send() -> Written:
            digest, size = hashlib.sha256(), 0
            file = self._store.open(key, "wb", block_size=PART_BYTES)
            try:
                for chunk in chunks:
                    mark()
                    file.write(chunk)
                    digest.update(chunk)
                    size += len(chunk)
                file.close()
            except BaseException:
                # Not closed: that would make a file of what is there so far.
                file.closed = True
                with contextlib.suppress(Exception):
                    file.discard()
                raise
            return Written(bytes=size, sha256=digest.hexdigest())

        return self._insist(send)

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """See `Place.read`."""
        if length == 0:
            return b""
        key = self._key(name)
        end = None if length is None else start + length
        data: bytes = self._insist(lambda: self._store.cat_file(key, start=start or None, end=end))
        return data

    def chunks(self, name: str) -> Iterator[bytes]:
        """See `Place.chunks`."""
        key = self._key(name)
        size = int(self._insist(lambda: self._store.info(key))["size"])
        for start in range(0, size, PART_BYTES):
            yield self.read(name, start, min(PART_BYTES, size - start))

    def remove(self, name: str) -> None:
        """See `Place.remove`; a checkpoint's manifest goes first."""
        key = self._key(name)
        assert name, "the place itself is not removed"

        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._store.rm_file(f"{key}/{MANIFEST}")
            with contextlib.suppress(FileNotFoundError):
                self._store.rm(key, recursive=True)

        self._insist(remove)

    def signature(self, name: str) -> tuple[object, ...]:
        """See `Place.signature`: names, sizes and what the store marks versions with."""
        marks = ("ETag", "etag", "generation", "LastModified", "last_modified", "created")
        return tuple(
            (file, info["size"], *(str(info[mark]) for mark in marks if mark in info))
            for file, info in self._find(name)
        )

    def free_bytes(self) -> int | None:
        """See `Place.free_bytes`."""
        return None

    def begin(self, final: str) -> Draft:
        """See `Place.begin`."""
        attempt = unique()
        return Draft(final=final, folder=f"{final}/{attempt}", prefix=f"{attempt}/")

    def publish(self, draft: Draft, manifest: bytes) -> None:
        """See `Place.publish`."""
        self._fence.require()
        name = f"{draft.final}/{MANIFEST}"
        try:
            self._put(name, manifest)
        except OSError:
            # Only the answer may have been lost. A checkpoint that is there must keep its files.
            if not self._holds(name, manifest):
                raise
        with contextlib.suppress(OSError):  # of what it replaces; `clean` comes by again
            self._remove_others(draft.final, {draft.prefix.rstrip("/")})

    def set_aside(self, name: str) -> str:
        """See `Place.set_aside`: copied within the store, manifest last, then removed."""
        aside = f"{ASIDE}{name}-{unique()}"
        for file in sorted(self.files(name), key=lambda file: file == MANIFEST):
            self._copy(f"{name}/{file}", f"{aside}/{file}")
        self.remove(name)
        return aside

    def clean(self) -> list[str]:
        """See `Place.clean`: takes the fence, then removes attempts that no manifest names."""
        self._fence.take()
        gone = []
        for name, is_folder in self._children(""):
            if is_folder:
                gone += self._remove_others(name, self._named(name))
        return gone

    def _named(self, checkpoint: str) -> set[str] | None:
        """The attempts that a checkpoint's manifest names; None if it cannot be told."""
        try:
            files = parse_json(self.read(f"{checkpoint}/{MANIFEST}"))["files"]
            return {str(file).partition("/")[0] for file in files}
        except FileNotFoundError:
            return set()
        except (ValueError, KeyError, TypeError):
            return None

    def _remove_others(self, checkpoint: str, kept: set[str] | None) -> list[str]:
        if kept is None:
            return []
        others = [n for n, is_folder in self._children(checkpoint) if is_folder and n not in kept]
        for attempt in others:
            self.remove(f"{checkpoint}/{attempt}")
        return [f"{checkpoint}/{attempt}" for attempt in others]

    def _put(self, name: str, data: bytes) -> None:
        """Writes a small file in one request: it is replaced at once."""
        key = self._key(name)
        self._insist(lambda: self._store.pipe_file(key, data))

    def _holds(self, name: str, data: bytes) -> bool:
        try:
            return self.read(name) == data
        except OSError:
            return False

    def _copy(self, name: str, other: str) -> None:
        source, target = self._key(name), self._key(other)
        self._insist(lambda: self._store.cp_file(source, target))

    def _exists(self, name: str) -> bool:
        try:
            key = self._key(name)
            self._insist(lambda: self._store.info(key))
        except FileNotFoundError:
            return False
        return True

    def _children(self, under: str) -> list[tuple[str, bool]]:
        """Names immediately below a folder, and whether they are folders."""
        key = self._key(under)
        try:
            listed = self._insist(lambda: self._store.ls(key, detail=True))
        except FileNotFoundError:
            return []
        found = [(_name(info), info["type"] == "directory") for info in listed]
        return [(name[len(key) + 1 :], is_folder) for name, is_folder in found if name != key]

    def _find(self, under: str) -> list[tuple[str, dict[str, Any]]]:
        """All objects below a folder, by sorted relative names."""
        key = self._key(under)
        try:
            found = self._insist(lambda: self._store.find(key, detail=True))
        except FileNotFoundError:
            return []
        objects = {_name(info)[len(key) + 1 :]: info for info in found.values()}
        return sorted((name, info) for name, info in objects.items() if name)

    def _key(self, name: str) -> str:
        return f"{self._root}/{inside(name)}".rstrip("/")

    def _insist(self, request: Callable[[], T]) -> T:
        return insist(request, self.retry_seconds, lambda: self.hurried)


def _name(info: dict[str, Any]) -> str:
    return str(info["name"]).rstrip("/")
