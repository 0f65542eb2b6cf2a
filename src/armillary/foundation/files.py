"""Files that are either whole or not there."""

from __future__ import annotations

import errno
import hashlib
import os
import uuid
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Makes renames inside `folder` durable, on file systems that can be asked for it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network mounts know no such
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it, durably; one that is there is left alone."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        sync_folder(each.parent)


def write_atomically(path: Path, content: bytes | str) -> None:
    """Writes a file so that a reader, or a crash, sees the old content or the new, never a part."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
