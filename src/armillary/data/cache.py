"""Where token stores are kept: FOLDER/{stores,building,index,locks}.

stores/KEY/          finished stores; KEY says what they were made from
building/            pieces of stores under way; left by a kill, used by the next attempt
index/STAMP.json     files as they lay on disk (sizes, times) -> the corpus's fingerprint
locks/               one file for each thing that only one process may do at a time
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock

from armillary.data.corpus import Source
from armillary.foundation.errors import ArmillaryError, Problem, RunError, UserError
from armillary.foundation.files import write_atomically
from armillary.foundation.machine import CACHE_VARIABLE, cache_base
from armillary.foundation.progress import Progress

_POLL_SECONDS = 0.2
_SETTLED_NS = 2_000_000_000
"""A file that changed more recently may change again within the clock's resolution."""


def cache_folder(configured: str) -> Path:
    """The folder for token stores: as configured, or below the base folder."""
    if configured:
        return Path(configured).expanduser().absolute()
    return cache_base() / "data"


def digest_of(value: Any) -> str:
    """SHA-256 of a JSON value in its canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def stamp_of(kind: str, sources: Sequence[Source]) -> str:
    """SHA-256 of how the sources lie on disk, without reading them."""
    digest = hashlib.sha256(f"{kind}\n".encode())
    for source in sources:
        line = f"{source.name}\0{source.path}\0{source.start}\0{source.end}\0{source.stamp}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


class Cache:
    """The folder of token stores, and the bookkeeping around it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def store(self, key: str) -> Path:
        """Where the finished store of a key is, or would be."""
        return self.folder / "stores" / key

    def building(self, name: str) -> Path:
        """Where work under way is kept."""
        return self.folder / "building" / name

    def known_fingerprint(self, stamp: str) -> str | None:
        """The fingerprint of a corpus that was read before and lies unchanged."""
        try:
            found = json.loads((self.folder / "index" / f"{stamp}.json").read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        fingerprint = found.get("fingerprint") if isinstance(found, dict) else None
        return fingerprint if isinstance(fingerprint, str) else None

    def remember_fingerprint(
        self, stamp: str, fingerprint: str, sources: Iterable[Source], now_ns: int | None = None
    ) -> None:
        """Notes a corpus's fingerprint, unless one of its files has only just changed."""
        now = time.time_ns() if now_ns is None else now_ns
        if all(source.changed_ns + _SETTLED_NS < now for source in sources):
            folder = self.folder / "index"
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / f"{stamp}.json", json.dumps({"fingerprint": fingerprint}))

    @contextmanager
    def locked(self, name: str, progress: Progress) -> Iterator[None]:
        """Holds a lock; while another process has it, shows that and waits."""
        folder = self.folder / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / f"{name}.lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            label = "waiting for another process that builds the same corpus"
            with progress.task(label, None, "s") as advance:
                _wait_for(lock, advance)
        try:
            yield
        finally:
            lock.release()

    def discard(self, name: str) -> None:
        """Removes work under way that is no longer needed."""
        shutil.rmtree(self.building(name), ignore_errors=True)


def _wait_for(lock: filelock.BaseFileLock, advance: Any) -> None:
    while True:
        try:
            lock.acquire(timeout=_POLL_SECONDS)
            return
        except filelock.Timeout:
            advance(_POLL_SECONDS)


_NOT_WRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST}
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


def cache_error(error: OSError, folder: Path) -> ArmillaryError:
    """What went wrong with the cache folder, for people."""
    if error.errno in _NOT_WRITABLE:
        return UserError(
            Problem(
                f"data.cache: cannot write in {folder}: {error.strerror}",
                "a folder that you may write in",
                f"--data.cache FOLDER, or set {CACHE_VARIABLE}",
            )
        )
    if error.errno in _NO_SPACE:
        return RunError(
            Problem(
                f"no space left for token stores in {folder}: {error.strerror}",
                fix="make room and run again (finished pieces are kept), or --data.cache FOLDER",
            )
        )
    return RunError(Problem(f"data.cache: {folder}: {error}", fix="--data.cache FOLDER"))
