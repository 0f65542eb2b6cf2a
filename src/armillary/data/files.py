"""Files of a corpus, on this machine's disks or in a store: found by globs, and read.

Addresses are s3://bucket/key, gs://bucket/key, az://container/key and, for what lies on the Hugging
Face hub, hf://datasets/OWNER/NAME/path. They are read through fsspec, in ranges of bytes, and each
request is made again while its store has trouble.
"""

from __future__ import annotations

import errno
import glob
import itertools
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from armillary.data.compression import decompressed, is_compressed
from armillary.data.corpus import Source
from armillary.data.remote_files import RemoteFile, find_remote
from armillary.foundation.errors import Problem, UserError
from armillary.foundation.stores import is_address

SOURCE_BYTES = 1 << 20
"""Files that can be read from the middle are cut into sources of at least this many bytes."""
REMOTE_SOURCE_BYTES = 1 << 23
"""...and those in a store, where each source costs some requests, of at least this many."""
SOURCES_PER_FILE = 1024
"""...and into about this many at most."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file of the corpus and its name relative to the corpus's root folder."""

    name: str
    path: str
    """Absolute path, or address."""
    size: int
    """As it lies there, in bytes."""
    stamp: str
    """Differs when the content may have changed."""
    changed_ns: int
    """When it last changed, nanoseconds since the epoch; 0 when that is of no use."""

    def source(self, start: int = 0, end: int = -1, size: int | None = None) -> Source:
        """The file, or a range of it, as a source."""
        return Source(
            name=self.name,
            path=self.path,
            start=start,
            end=end,
            size=self.size if size is None else size,
            stamp=self.stamp,
            changed_ns=self.changed_ns,
        )

    def ranges(self, unit: int = 1) -> list[Source]:
        """The file in ranges of units of so many bytes, cut by nothing but the file's own size."""
        least = REMOTE_SOURCE_BYTES if is_address(self.path) else SOURCE_BYTES
        step = max(least, -(-self.size // SOURCES_PER_FILE)) // unit or 1
        count = -(-self.size // unit)
        starts = range(0, max(count, 1), step)
        ends = [min(start + step, count) for start in starts]
        return [
            self.source(start, end, (end - start) * unit)
            for start, end in zip(starts, ends, strict=True)
        ]


_NOT_FOR_US = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR)

# Finding -------------------------------------------------------------------------------------


def find_files(patterns: tuple[str, ...]) -> list[FoundFile]:
    """Files that match, each once, in the order of their names.

    Names are relative to the deepest folder that the fixed beginnings of all patterns share, so
    that moving a corpus as a whole renames no document. A glob passes over pipes, sockets and
    devices, which would be waited for.

    Raises:
        UserError: no pattern is given, or one matches no file, or names what is none, or a store
            does not answer.
    """
    if not patterns:
        raise UserError(
            Problem(
                "data.corpus.files is empty",
                "one glob or more; ** also matches folders below",
                "--data.corpus.files 'my/texts/**/*.txt'",
            )
        )
    problems: list[Problem] = []
    found: dict[str, tuple[int, str, int]] = {}
    roots = []
    for pattern in patterns:
        absolute = pattern if is_address(pattern) else _absolute(pattern)
        try:
            if is_address(absolute):
                matches = find_remote(absolute)
            else:
                matches = {path: look_up(Path(path)) for path in _find_local(pattern, absolute)}
        except UserError as error:
            problems += error.problems
            continue
        if not matches:
            problems.append(_no_match(pattern, absolute))
        found |= matches
        roots.append(_fixed_folder(absolute))
    if problems:
        raise UserError(problems)
    root = _shared_folder(roots)
    files = [FoundFile(_relative(path, root), path, *facts) for path, facts in found.items()]
    return sorted(files, key=lambda file: os.fsencode(file.name))


def found_file(path: Path, root: Path) -> FoundFile:
    """Looks a file up; one that cannot be looked up gets an empty stamp and fails when read."""
    return FoundFile(path.relative_to(root).as_posix(), str(path), *look_up(path))


def look_up(path: Path) -> tuple[int, str, int]:
    """A file's size, stamp, and time of change; without the last two where it cannot be told."""
    try:
        status = path.stat()
    except OSError:
        return 0, "", 0
    changed = max(status.st_mtime_ns, status.st_ctime_ns)
    return status.st_size, f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}", changed


def facts_of(path: str) -> tuple[int, str, int]:
    """What `look_up` finds, of a path or of an address.

    Raises:
        FileNotFoundError: it is not there.
        UserError: the store does not answer.
    """
    if is_address(path):
        found = find_remote(path)
        if path not in found:
            raise FileNotFoundError(errno.ENOENT, f"there is no {path}")
        return found[path]
    if not Path(path).is_file():
        raise FileNotFoundError(errno.ENOENT, f"there is no {path}")
    return look_up(Path(path))


def folder_facts(paths: list[str]) -> dict[str, tuple[int, str, int]]:
    """What `look_up` finds of those that are there; in a store, with one listing for a folder.

    Raises:
        UserError: the store does not answer.
    """
    found = {path: look_up(Path(path)) for path in paths if Path(path).is_file()}
    for folder in sorted({path.rpartition("/")[0] for path in paths if is_address(path)}):
        found |= find_remote(f"{folder}/*")
    return {path: found[path] for path in paths if path in found}


def would_block(path: Path) -> bool:
    """Whether it is a pipe, a socket or a device; what cannot be looked up fails when read."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _absolute(pattern: str) -> str:
    return os.path.abspath(os.path.expanduser(pattern))  # noqa: PTH100, PTH111


def _find_local(pattern: str, absolute: str) -> list[str]:
    named = not glob.has_magic(absolute)
    matches = [Path(match) for match in glob.glob(absolute, recursive=True)]  # noqa: PTH207
    files = [match for match in matches if named or not would_block(match)]
    files = [match for match in files if not match.is_dir()]
    if named and files and would_block(files[0]):
        raise UserError(
            Problem(
                f"data.corpus.files: {pattern!r} is a pipe, a socket or a device",
                "regular files, which can be read again",
                "write what it yields to a file first",
            )
        )
    return [str(file) for file in files]


def _fixed_folder(pattern: str) -> str:
    folder = pattern.rpartition("/")[0]
    while glob.has_magic(folder):
        folder = folder.rpartition("/")[0]
    return folder


def _shared_folder(folders: list[str]) -> list[str]:
    """The parts that paths or addresses of folders begin with in common."""
    levels = zip(*(folder.split("/") for folder in folders), strict=False)
    return [level[0] for level in itertools.takewhile(lambda level: len(set(level)) == 1, levels)]


def _relative(path: str, root: list[str]) -> str:
    return "/".join(path.split("/")[len(root) :])


def _no_match(pattern: str, absolute: str) -> Problem:
    if is_address(pattern):
        return Problem(
            f"data.corpus.files: {pattern!r} matches no file",
            fix="check the spelling; quote globs in the shell",
        )
    if Path(absolute).is_dir():
        return Problem(
            f"data.corpus.files: {pattern!r} is a folder",
            "globs that match files",
            f"--data.corpus.files '{pattern.rstrip('/')}/**/*.*'",
        )
    parent = Path(_fixed_folder(absolute) or "/")
    seen = f"{parent} {'exists' if parent.is_dir() else 'does not exist'}"
    return Problem(
        f"data.corpus.files: {pattern!r} matches no file ({seen})",
        fix="check the spelling; quote globs in the shell",
    )


# Reading -------------------------------------------------------------------------------------


def open_file(path: str) -> BinaryIO:
    """A file as it lies there, which can be read from any byte on.

    Raises:
        OSError: it cannot be read; also while it is.
        UserError: the optional dependency group for its store is not installed.
    """
    if is_address(path):
        return cast(BinaryIO, RemoteFile(path).buffered())
    return Path(path).open("rb")


def open_content(path: str) -> BinaryIO:
    """What is in a file, decompressed as its suffix says; see `decompressed`."""
    return decompressed(open_file(path), path)


def is_whole_only(path: str) -> bool:
    """Whether a file can be read from its beginning only, as it is compressed."""
    return is_compressed(path)


def unreadable(path: str, error: OSError) -> Problem:
    """The problem of a file that cannot be read."""
    there = error.errno not in _NOT_FOR_US
    fix = "fetch it again" if there else "check that it exists and its permissions"
    return Problem(
        f"cannot read {path}: {error.strerror or error}",
        fix=f"{fix}, or narrow --data.corpus.files",
    )
