"""A folder of checkpoints on this machine's file system. Imports no torch.

Every change here survives a kill: a checkpoint is written under a `.tmp-` name and renamed when it
is whole; a folder is renamed to such a name before it is taken apart; and a checkpoint that is
replaced stays whole under a `.tmp-replaced-` name until its successor is in place.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from armillary.checkpoint.places.place import (
    ASIDE,
    CHUNK_BYTES,
    MANIFEST,
    Draft,
    Written,
    inside,
    unique,
)
from armillary.foundation.files import make_folder, sync_folder
from armillary.foundation.progress import mark

_TEMPORARY = ".tmp-"
_REPLACED = ".tmp-replaced-"
_REMOVED = ".tmp-removed-"
_LEFT_BEHIND = re.compile(r"\.tmp-(?:replaced-|removed-)?(?P<final>[\w.-]+)-[0-9a-f]{12}")


class LocalPlace:
    """See `Place`.

    Args:
        folder: made by the first write.
    """

    file_bytes = 1 << 32

    def __init__(self, folder: Path) -> None:
        self.local = folder
        self.address = str(folder)
        self.hurried = False
        self._device: int | None = None
        self._published: str | None = None
        """A checkpoint that is there as long as its disk is, unless somebody removes it."""

    def names(self, under: str = "") -> list[str]:
        """See `Place.names`."""
        try:
            return sorted(path.name for path in self._path(under).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def folders(self, under: str = "") -> list[str]:
        """See `Place.folders`."""
        folder = self._path(under)
        named = (name for name in self.names(under) if not name.startswith(_TEMPORARY))
        return [name for name in named if (folder / name).is_dir()]

    def files(self, under: str = "") -> dict[str, int]:
        """See `Place.files`."""
        folder = self._path(under)
        return {name: status.st_size for name, status in _stats(folder)}

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> Written:
        """See `Place.write`."""
        path = self._path(name)
        make_folder(path.parent)
        temporary = path.with_name(f".{path.name}.{unique()}.tmp")
        digest = hashlib.sha256()
        size = 0
        try:
            with temporary.open("wb") as file:
                for chunk in chunks:
                    mark()
                    file.write(chunk)
                    digest.update(chunk)
                    size += len(chunk)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
        return Written(bytes=size, sha256=digest.hexdigest())

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """See `Place.read`."""
        mark()
        with self._open(name) as file:
            file.seek(start)
            return file.read() if length is None else file.read(length)

    def chunks(self, name: str) -> Iterator[bytes]:
        """See `Place.chunks`."""
        with self._open(name) as file:
            while chunk := file.read(CHUNK_BYTES):
                mark()
                yield chunk

    def remove(self, name: str) -> None:
        """See `Place.remove`."""
        path = self._path(name)
        assert name and path != self.local, "the place itself is not removed"
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            return
        if not path.name.startswith(_TEMPORARY):
            path = path.rename(path.with_name(f"{_REMOVED}{path.name}-{unique()}"))
            sync_folder(path.parent)
        shutil.rmtree(path)

    def signature(self, name: str) -> tuple[object, ...]:
        """See `Place.signature`: names, sizes and times of modification."""
        return tuple((name, one.st_size, one.st_mtime_ns) for name, one in _stats(self._path(name)))

    def free_bytes(self) -> int | None:
        """See `Place.free_bytes`."""
        folder = self.local.absolute()
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def begin(self, final: str) -> Draft:
        """See `Place.begin`."""
        folder = f"{_TEMPORARY}{final}-{unique()}"
        make_folder(self.local)
        self._require_same_disk()
        self._path(folder).mkdir()
        return Draft(final=final, folder=folder)

    def publish(self, draft: Draft, manifest: bytes) -> None:
        """See `Place.publish`."""
        self.write(f"{draft.folder}/{MANIFEST}", [manifest])  # and syncs the folder
        temporary, final = self._path(draft.folder), self._path(draft.final)
        replaced = None
        if final.exists():
            replaced = final.rename(final.with_name(f"{_REPLACED}{final.name}-{unique()}"))
        try:
            temporary.rename(final)
        except BaseException:
            if replaced is not None:
                replaced.rename(final)
            raise
        sync_folder(self.local)
        self._published = draft.final
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)

    def set_aside(self, name: str) -> str:
        """See `Place.set_aside`."""
        aside = f"{ASIDE}{name}-{unique()}"
        self._path(name).rename(self._path(aside))
        sync_folder(self.local)
        return aside

    def clean(self) -> list[str]:
        """See `Place.clean`; one run at a time is what the claim on the run folder is for."""
        gone = []
        for name in self.names():
            match = _LEFT_BEHIND.fullmatch(name)
            if match is None:
                continue
            path, final = self._path(name), self._path(match.group("final"))
            if name.startswith(_REPLACED) and not final.exists():
                path.rename(final)
                continue
            shutil.rmtree(path, ignore_errors=True)
            gone.append(name)
        if self.local.is_dir():
            sync_folder(self.local)
            self._device = self.local.stat().st_dev
            self._published = max(self.folders(), default=None)
        return gone

    def _require_same_disk(self) -> None:
        """Where a mount was lost, its empty mount point must not be taken for the place.

        A disk that was mounted again may have another number, but holds what was published.
        """
        device = self.local.stat().st_dev
        held = self._published is None or (self.local / self._published).exists()
        if not held and self._device not in (None, device):
            words = f"{self._published} is gone, and the disk with it: is it still mounted?"
            raise OSError(errno.ENODEV, words, str(self.local))
        self._device = device

    def _open(self, name: str) -> BinaryIO:
        """A regular file, to read: a link might lead outside, and a pipe would never end."""
        path = self._path(name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
        else:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return os.fdopen(descriptor, "rb")
            os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))

    def _path(self, name: str) -> Path:
        return self.local / inside(name)


def _stats(folder: Path) -> list[tuple[str, os.stat_result]]:
    """Regular files below a folder, by sorted relative names; links are not even followed."""
    found = []
    for above, _, names in os.walk(folder):
        for name in names:
            path = Path(above, name)
            with contextlib.suppress(FileNotFoundError):  # it may just be on its way out
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    found.append((path.relative_to(folder).as_posix(), status))
    return sorted(found, key=lambda each: each[0])
