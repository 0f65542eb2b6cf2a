"""The corpus slot: what a corpus is, how its documents are named, decoded and read in pieces."""

from __future__ import annotations

import glob
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from armillary.foundation.component import Component
from armillary.foundation.errors import ArmillaryError, Problem, UserError

BAD_TEXT_CHOICES = ("error", "replace", "skip")

SOURCE_BYTES = 1 << 20
"""Files that can be read from the middle are cut into sources of at least this many bytes."""
SOURCES_PER_FILE = 1024
"""...and into about this many at most."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text that is trained on, or held out, as a whole."""

    id: str
    """Stable name; whether the document is held out depends on nothing else."""
    text: str


@dataclass(frozen=True, slots=True)
class Source:
    """A part of a corpus that is read in one go: a file, a range of its bytes, or of its rows."""

    name: str
    """What the ids of its documents begin with."""
    path: str = ""
    start: int = 0
    end: int = -1
    """First and one past the last byte or row; -1 is the end."""
    size: int = 0
    """About how many bytes it holds; work is shared out by it."""
    stamp: str = ""
    """Differs when the content may have changed (size and times of the file)."""
    changed_ns: int = 0
    """When the file last changed, nanoseconds since the epoch; 0 when unknown."""


class CorpusConfig(Component, ABC):
    """Slot `data.corpus`: where documents come from."""

    __slots__ = ()

    @abstractmethod
    def sources(self) -> list[Source]:
        """What there is to read, in the corpus's own fixed order; looks at no content.

        Raises:
            UserError: nothing matches, or the values ask for nothing that is there.
        """

    @abstractmethod
    def read(self, source: Source) -> Iterator[Document | Problem]:
        """The documents of one source, in order; what cannot be read comes as a `Problem`."""

    def problems(self) -> list[Problem]:
        """What is wrong with the values themselves; looks for no file."""
        policy = getattr(self, "on_bad_text", "error")
        if policy in BAD_TEXT_CHOICES:
            return []
        choices = ", ".join(BAD_TEXT_CHOICES)
        fix = "--data.corpus.on-bad-text replace"
        return [Problem(f"data.corpus.on_bad_text = {policy!r}", choices, fix)]

    def source_problems(self) -> list[Problem]:
        """What keeps `sources` from finding anything to read."""
        return problems_of(self.sources)


def problems_of(question: Callable[[], object]) -> list[Problem]:
    """What a call raises in words for people; nothing when it returns."""
    try:
        question()
    except ArmillaryError as error:
        return error.problems
    return []


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One corpus of a mixture and how much of it to use."""

    corpus: CorpusConfig
    """Where its documents come from."""
    weight: float = 1.0
    """Share of the training samples, relative to the other parts' weights (no unit)."""


def corpus_parts(corpus: CorpusConfig) -> tuple[Part, ...]:
    """The parts of a mixture; any other corpus is its own only part.

    Raises:
        UserError: a mixture without parts, inside a mixture, or with a weight that is not positive.
    """
    parts: tuple[Part, ...] | None = getattr(corpus, "parts", None)
    if parts is None:
        return (Part(corpus=corpus),)
    problems = []
    if not parts:
        problems.append(Problem("data.corpus.parts is empty", "one part or more"))
    for index, part in enumerate(parts):
        where = f"data.corpus.parts.{index}"
        if not 0 < part.weight < float("inf"):
            problems.append(Problem(f"{where}.weight = {part.weight}", "a finite number above 0"))
        if getattr(part.corpus, "parts", None) is not None:
            problems.append(
                Problem(f"{where}.corpus is itself a mixture", "list its parts in the outer one")
            )
    if problems:
        raise UserError(problems)
    return parts


# Files ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file of the corpus and its name relative to the corpus's root folder."""

    name: str
    path: Path
    size: int
    stamp: str
    changed_ns: int

    def source(self, start: int = 0, end: int = -1, size: int | None = None) -> Source:
        """The file, or a range of it, as a source."""
        return Source(
            name=self.name,
            path=str(self.path),
            start=start,
            end=end,
            size=self.size if size is None else size,
            stamp=self.stamp,
            changed_ns=self.changed_ns,
        )

    def ranges(self) -> list[Source]:
        """The file in byte ranges of a size that depends on nothing but the file's own."""
        step = max(SOURCE_BYTES, -(-self.size // SOURCES_PER_FILE))
        starts = range(0, max(self.size, 1), step)
        ends = [min(start + step, self.size) for start in starts]
        return [
            self.source(start, end, end - start) for start, end in zip(starts, ends, strict=True)
        ]


def found_file(path: Path, root: Path) -> FoundFile:
    """Looks a file up; one that cannot be looked up gets an empty stamp and fails when read."""
    name = path.relative_to(root).as_posix()
    try:
        status = path.stat()
    except OSError:
        return FoundFile(name, path, 0, "", 0)
    changed = max(status.st_mtime_ns, status.st_ctime_ns)
    stamp = f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
    return FoundFile(name, path, status.st_size, stamp, changed)


def find_files(patterns: tuple[str, ...]) -> list[FoundFile]:
    """Files that match, each once, in the order of their names.

    Names are relative to the deepest folder that the fixed beginnings of all patterns share, so
    that moving a corpus as a whole renames no document. A glob passes over pipes, sockets and
    devices, which would be waited for.

    Raises:
        UserError: no pattern is given, or one matches no file, or names what is none.
    """
    if not patterns:
        raise UserError(
            Problem(
                "data.corpus.files is empty",
                "one glob or more; ** also matches folders below",
                "--data.corpus.files 'my/texts/**/*.txt'",
            )
        )
    problems, paths, roots = [], set(), []
    for pattern in patterns:
        absolute = os.path.abspath(os.path.expanduser(pattern))  # noqa: PTH100, PTH111
        matches = [Path(match) for match in glob.glob(absolute, recursive=True)]  # noqa: PTH207
        named = not glob.has_magic(absolute)
        files = [match for match in matches if named or not would_block(match)]
        files = [match for match in files if not match.is_dir()]
        if named and files and would_block(files[0]):
            problems.append(_no_file(pattern))
        elif not files:
            problems.append(_no_match(pattern, Path(absolute)))
        roots.append(_fixed_folder(absolute))
        paths.update(files)
    if problems:
        raise UserError(problems)
    root = Path(os.path.commonpath(roots))
    found = [found_file(path, root) for path in paths]
    return sorted(found, key=lambda file: os.fsencode(file.name))


def would_block(path: Path) -> bool:
    """Whether it is a pipe, a socket or a device; what cannot be looked up fails when read."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _no_file(pattern: str) -> Problem:
    return Problem(
        f"data.corpus.files: {pattern!r} is a pipe, a socket or a device",
        "regular files, which can be read again",
        "write what it yields to a file first",
    )


def _fixed_folder(pattern: str) -> str:
    folder = Path(pattern).parent
    while glob.has_magic(str(folder)):
        folder = folder.parent
    return str(folder)


def _no_match(pattern: str, path: Path) -> Problem:
    message = f"data.corpus.files: {pattern!r} matches no file"
    if path.is_dir():
        return Problem(
            f"data.corpus.files: {pattern!r} is a folder",
            "globs that match files",
            f"--data.corpus.files '{pattern.rstrip('/')}/**/*.*'",
        )
    parent = Path(_fixed_folder(str(path)))
    seen = f"{parent} {'exists' if parent.is_dir() else 'does not exist'}"
    return Problem(f"{message} ({seen})", fix="check the spelling; quote globs in the shell")


# Text ----------------------------------------------------------------------------------------


def decode_text(raw: bytes, where: str, on_bad_text: str, offset: int = 0) -> str | Problem | None:
    """UTF-8 bytes as text; None where the policy skips them.

    Args:
        raw: the bytes.
        where: file (and line) for the message.
        on_bad_text: `error`, `replace` or `skip`.
        offset: where `raw` begins in the file, for the message.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if on_bad_text == "replace":
            return raw.decode("utf-8", "replace")
        if on_bad_text == "skip":
            return None
        return _bad_text(f"{where}: byte {offset + error.start} is not UTF-8 text")


def clean_text(text: str, where: Callable[[], str], on_bad_text: str) -> str | Problem | None:
    """Text that can be written as UTF-8: half a surrogate pair (JSON allows it) cannot."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError as error:
        if on_bad_text == "replace":
            return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        if on_bad_text == "skip":
            return None
        return _bad_text(f"{where()}: character {error.start} is half of a surrogate pair")


def _bad_text(message: str) -> Problem:
    return Problem(
        message,
        "text in UTF-8",
        "convert the file, or --data.corpus.on-bad-text replace (or skip)",
    )


def unreadable(path: str, error: OSError) -> Problem:
    """The problem of a file that cannot be read."""
    return Problem(
        f"cannot read {path}: {error.strerror or error}",
        fix="check that it exists and its permissions, or narrow --data.corpus.files",
    )
