"""A folder of checkpoints, wherever it lies. Imports no torch.

Names are relative to the place, with "/" between their parts. What cannot be done raises `OSError`
(`FileNotFoundError` for what is not there), in every kind of place.

How a checkpoint gets there: `begin` gives a draft, all ranks write files into its folder, and
`publish` adds the manifest, last. Before, no reader sees a checkpoint; after, it is whole and
durable. A local folder is renamed when it is whole. An object store cannot rename, so there the
manifest, put in one request, is what publishes: it names files in a folder of that attempt alone.
"""

from __future__ import annotations

import errno
import re
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

MANIFEST = "manifest.json"
"""The file that makes a folder a checkpoint."""

ASIDE = "set-aside-"
"""What the names of checkpoints begin with that no longer belong to the run."""

_NAME = re.compile(r"[^\0\\\ud800-\udfff]*")

CHUNK_BYTES = 1 << 23
"""Most bytes that are read at once where a whole file is gone through."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A file that is durable."""

    bytes: int = 0
    """Its size."""
    sha256: str = ""
    """Hexadecimal SHA-256 of its bytes, taken as they were written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A checkpoint that is being written; nobody sees it yet."""

    final: str
    """Name of the checkpoint that it will be."""
    folder: str
    """Name of the folder to write its files into."""
    prefix: str = ""
    """What a file's name begins with in the published checkpoint: "" or "<attempt>/"."""


class Place(Protocol):
    """A folder of checkpoints; `LocalPlace` and `RemotePlace` are the kinds there are."""

    hurried: bool
    """Whether somebody waits, so that a request which fails is not made again for long."""

    @property
    def address(self) -> str:
        """Where it is, for people: a path or an address such as s3://bucket/run."""

    @property
    def local(self) -> Path | None:
        """The folder itself, if it is one of this machine's file system."""

    @property
    def file_bytes(self) -> int:
        """Bytes of one file at which large amounts are written and read best."""

    def names(self, under: str = "") -> list[str]:
        """Files and folders immediately below a folder, sorted; none if there is no such folder."""

    def folders(self, under: str = "") -> list[str]:
        """Folders immediately below a folder, sorted, without those that are still drafts."""

    def files(self, under: str = "") -> dict[str, int]:
        """All regular files below a folder, named relative to it, with their bytes; no links."""

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> Written:
        """Writes a file, whole or not at all, with the folders above it; durable on return.

        Args:
            name: an old file of that name is replaced.
            chunks: its bytes in order; gone through again where it is sent again.
        """

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file from `start`, which lies in it; fewer than `length` where it ends."""

    def chunks(self, name: str) -> Iterator[bytes]:
        """All bytes of a file, in order, little at a time."""

    def remove(self, name: str) -> None:
        """Removes a file or all of a folder. What is not there is no error."""

    def signature(self, name: str) -> tuple[object, ...]:
        """Changes when anyone writes to a folder."""

    def free_bytes(self) -> int | None:
        """Bytes that can still be written; None where there is no limit to ask for."""

    def begin(self, final: str) -> Draft:
        """Room for a new checkpoint of that name."""

    def publish(self, draft: Draft, manifest: bytes) -> None:
        """Adds the manifest and gives the draft its name, in place of one that has it.

        Raises:
            RunError: another run has taken the place over.
        """

    def set_aside(self, name: str) -> str:
        """Renames a checkpoint so that it no longer belongs to the run; returns its new name."""

    def clean(self) -> list[str]:
        """Takes the place over for this process, as its only writer from now on.

        Puts back what a dead writer had moved aside; removes what it left unfinished, and returns
        the names.
        """


def unique() -> str:
    """Twelve hexadecimal digits that nobody else has."""
    return uuid.uuid4().hex[:12]


def inside(name: str) -> str:
    """The name, if it stays inside of the place.

    Raises:
        PermissionError: it is absolute, climbs out, or is not a file name at all.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not _NAME.fullmatch(name):
        raise PermissionError(errno.EACCES, "this is no name within the folder", name)
    return name
