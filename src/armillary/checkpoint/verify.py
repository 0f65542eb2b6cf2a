"""Whether a checkpoint is proven: its manifest, and every file that it names. Imports no torch."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

from armillary.checkpoint.manifest import Unreadable, Unverified, read_manifest, reason_of
from armillary.checkpoint.places.place import Place
from armillary.foundation.progress import NoProgress, Progress

_GLANCE_SECONDS = 0.2
"""How often progress is told, and a request to stop heard."""


def verify(place: Place, name: str, progress: Progress | None = None) -> dict[str, Any]:
    """The manifest of a checkpoint, after every file was read and matched.

    Raises:
        Unverified: the first thing that is wrong; `Unreadable` where that may pass.
    """
    manifest = read_manifest(place, name)
    files: dict[str, dict[str, Any]] = manifest["files"]
    _require_sizes(place, name, files)
    reading = _Reading(place, name)
    total = sum(entry["bytes"] for entry in files.values())
    with (
        (progress or NoProgress()).task(f"verifying {name}", total, "bytes") as advance,
        ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool,
    ):
        try:
            digests = {pool.submit(reading.digest, file): file for file in files}
            pending: set[Future[str]] = set(digests)
            while pending:
                done, pending = wait(pending, _GLANCE_SECONDS, FIRST_EXCEPTION)
                advance(reading.take_count())
                for each in done:
                    if each.result() != files[digests[each]]["sha256"]:
                        raise Unverified(f"{digests[each]} does not match its checksum")
        finally:  # `advance` may raise too, when a stop was asked for
            reading.stop.set()
            pool.shutdown(cancel_futures=True)
    return manifest


class _Reading:
    """Files of one checkpoint, read in several threads."""

    def __init__(self, place: Place, name: str) -> None:
        self.stop = threading.Event()
        self._place, self._name = place, name
        self._lock = threading.Lock()
        self._count = 0

    def digest(self, file: str) -> str:
        """Hexadecimal SHA-256 of a file."""
        digest = hashlib.sha256()
        try:
            for chunk in self._place.chunks(f"{self._name}/{file}"):
                if self.stop.is_set():
                    break
                digest.update(chunk)
                with self._lock:
                    self._count += len(chunk)
        except OSError as error:
            raise Unreadable(f"{file} is unreadable ({reason_of(error)})") from None
        return digest.hexdigest()

    def take_count(self) -> int:
        """Bytes read since the last call."""
        with self._lock:
            count, self._count = self._count, 0
        return count


def _require_sizes(place: Place, name: str, files: Mapping[str, Mapping[str, Any]]) -> None:
    try:
        sizes = place.files(name)
    except OSError as error:
        raise Unreadable(f"cannot be listed ({reason_of(error)})") from None
    for file, entry in files.items():
        if file not in sizes:
            raise Unverified(f"{file} is missing, or not a regular file")
        if sizes[file] != entry["bytes"]:
            raise Unverified(f"{file} has {sizes[file]} bytes instead of {entry['bytes']}")
