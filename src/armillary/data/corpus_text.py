"""Corpora of plain files: the installed Python standard library, and text files by glob."""

from __future__ import annotations

import errno
import io
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from armillary.data.corpus import CorpusConfig, Document, Source, decode_text
from armillary.data.files import (
    FoundFile,
    find_files,
    found_file,
    open_content,
    unreadable,
    would_block,
)
from armillary.foundation.component import component
from armillary.foundation.errors import Problem, UserError

LONGEST_DOCUMENT = 1 << 30
"""Bytes; a longer one is refused rather than held in memory."""

_BLOCK_BYTES = 1 << 20
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}


@component("stdlib")
@dataclass(frozen=True, kw_only=True, slots=True)
class StandardLibrary(CorpusConfig):
    """Source text of the installed Python standard library, tests included: one file a document."""

    folder: str = ""
    """Folder of the library; empty is that of the running Python."""

    def sources(self) -> list[Source]:
        """See `CorpusConfig.sources`."""
        root = Path(self.folder or sysconfig.get_path("stdlib")).expanduser().absolute()
        found: list[FoundFile] = []
        for folder, below, files in os.walk(root):
            below[:] = [name for name in below if name not in _NOT_THE_LIBRARY]
            modules = [Path(folder, name) for name in files if name.endswith(".py")]
            found += [found_file(path, root) for path in modules if not would_block(path)]
        if not found:
            raise UserError(
                Problem(
                    f"data.corpus (stdlib): {root} holds no .py file",
                    "a Python installation with its library as source text",
                    "install the library's source, or --data.corpus text --data.corpus.files GLOB",
                )
            )
        found.sort(key=lambda file: os.fsencode(file.name))
        return [file.source() for file in found]

    def read(self, source: Source) -> Iterator[Document | Problem]:
        """See `CorpusConfig.read`."""
        try:
            raw = Path(source.path).read_bytes()
        except OSError as error:
            yield unreadable(source.path, error)
            return
        yield Document(source.name, decode_python_source(raw))


def decode_python_source(raw: bytes) -> str:
    """A module's text: UTF-8, else the encoding it declares, else UTF-8 with replacements."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        pass
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        text = raw.decode(encoding)
        text.encode("utf-8")
        return text
    except (SyntaxError, LookupError, UnicodeError):
        return raw.decode("utf-8", "replace")


@component("text")
@dataclass(frozen=True, kw_only=True, slots=True)
class Text(CorpusConfig):
    """Text files, plain, .gz, .bz2, .xz or .zst: one a document, or many where one separates them.

    A document's id is its file's name, and with a separator the byte at which it begins.
    """

    files: tuple[str, ...] = ()
    """Globs of paths, or of s3://, gs://, az:// or hf:// addresses; ** also matches folders."""
    separator: str = ""
    """Text between two documents of one file (\\n is a new line); empty: a file is one document."""
    on_bad_text: str = "error"
    """What to do with a document that is not UTF-8: error, replace (with U+FFFD) or skip."""

    def sources(self) -> list[Source]:
        """See `CorpusConfig.sources`."""
        return [file.source() for file in find_files(self.files)]

    def read(self, source: Source) -> Iterator[Document | Problem]:
        """See `CorpusConfig.read`."""
        separator = self.separator.replace("\\n", "\n").replace("\\t", "\t").encode()
        try:
            for offset, part in _parts(source.path, separator):
                text = decode_text(part, source.path, self.on_bad_text, offset)
                if isinstance(text, Problem):
                    yield text
                elif text is not None:
                    yield Document(f"{source.name}@{offset}" if separator else source.name, text)
        except OSError as error:
            yield unreadable(source.path, error)


def _parts(path: str, separator: bytes) -> Iterator[tuple[int, bytes]]:
    """The documents of a file and where they begin in it; no more of it is held than one of them.

    Raises:
        OSError: the file cannot be read, or a document is too long to be held.
    """
    with open_content(path) as file:
        offset, text, ends = 0, bytearray(), False
        while not ends:
            block = file.read(_BLOCK_BYTES)
            ends = not block
            looked_at = max(0, len(text) - len(separator) + 1)
            text += block
            while separator and (cut := text.find(separator, looked_at)) >= 0:
                yield offset, bytes(text[:cut])
                offset += cut + len(separator)
                del text[: cut + len(separator)]
                looked_at = 0
            if len(text) > LONGEST_DOCUMENT:
                words = f"the document at byte {offset} has more than {LONGEST_DOCUMENT} bytes"
                raise OSError(errno.EFBIG, words)
        yield offset, bytes(text)
