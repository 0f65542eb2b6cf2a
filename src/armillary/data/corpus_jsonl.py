"""Corpora of JSON lines: one document a line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from armillary.data.corpus import (
    CorpusConfig,
    Document,
    Source,
    clean_text,
    decode_text,
    find_files,
    unreadable,
)
from armillary.foundation.component import component
from armillary.foundation.errors import Problem, UserError


@component("jsonl")
@dataclass(frozen=True, kw_only=True, slots=True)
class JsonLines(CorpusConfig):
    """Files of JSON lines, plain or .gz: the text of one field of each line is a document.

    A document's id is its file's name and the byte at which its line begins.
    """

    files: tuple[str, ...] = ()
    """Globs; ** also matches folders below, ~ is the home folder."""
    field: str = "text"
    """Field of each object that holds the text."""
    on_bad_text: str = "error"
    """What to do with a line that is not UTF-8: error, replace (with U+FFFD) or skip."""

    def sources(self) -> list[Source]:
        """See `CorpusConfig.sources`."""
        if not self.field:
            raise UserError(Problem("data.corpus.field is empty", "the name of a field"))
        sources = []
        for file in find_files(self.files):
            sources += [file.source()] if file.path.suffix == ".gz" else file.ranges()
        return sources

    def read(self, source: Source) -> Iterator[Document | Problem]:
        """See `CorpusConfig.read`."""
        try:
            for offset, line in _lines(source):
                yield from self._document(source, offset, line)
        except OSError as error:  # gzip.BadGzipFile too
            yield unreadable(source.path, error)
        except (EOFError, zlib.error) as error:
            yield unreadable(source.path, OSError(f"not a whole gzip file ({error})"))

    def _document(self, source: Source, offset: int, line: bytes) -> Iterator[Document | Problem]:
        line = line.rstrip()
        if not line:
            return
        text = decode_text(line, source.path, self.on_bad_text, offset)
        if isinstance(text, Problem):  # say it again with the line's number, which costs a count
            text = decode_text(line, _place(source, offset), self.on_bad_text, offset)
        if isinstance(text, str):
            text = self._field_of(text, source, offset)
        if isinstance(text, Problem):
            yield text
        elif text is not None:
            yield Document(f"{source.name}@{offset}", text)

    def _field_of(self, line: str, source: Source, offset: int) -> str | Problem | None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            return Problem(
                f"{_place(source, offset)} is not JSON: {error}",
                "one JSON object a line",
                "repair or remove the line",
            )
        if not isinstance(record, dict):
            return Problem(
                f"{_place(source, offset)} is a JSON {type(record).__name__}",
                "one JSON object a line",
                "repair or remove the line",
            )
        if self.field not in record:
            names = ", ".join(sorted(map(str, record))) or "none"
            return Problem(
                f"{_place(source, offset)} has no field {self.field!r}",
                f"fields of that line: {names}",
                "--data.corpus.field NAME",
            )
        value = record[self.field]
        if not isinstance(value, str):
            return Problem(
                f"{_place(source, offset)}: field {self.field!r} is a JSON {_json_kind(value)}",
                "a string",
                "--data.corpus.field NAME, or repair the line",
            )
        return clean_text(value, lambda: _place(source, offset), self.on_bad_text)


def _json_kind(value: object) -> str:
    if value is None:
        return "null"
    return {dict: "object", list: "array", bool: "boolean"}.get(type(value), "number")


def _open(path: str) -> IO[bytes]:
    if path.endswith(".gz"):
        return cast(IO[bytes], gzip.open(path, "rb"))
    return Path(path).open("rb")


def _lines(source: Source) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in [start, end), with the offsets at which they begin."""
    with _open(source.path) as file:
        offset = source.start
        if offset > 0:  # the line under way belongs to the range in which it began
            file.seek(offset - 1)
            offset += len(file.readline()) - 1
        while source.end < 0 or offset < source.end:
            line = file.readline()
            if not line:
                return
            yield offset, line
            offset += len(line)


def _place(source: Source, offset: int) -> str:
    """`file:line` of the line that begins at `offset`; counted only once something is wrong."""
    with _open(source.path) as file:
        number, left = 1, offset
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            number += block.count(b"\n")
            left -= len(block)
    return f"{source.path}:{number}"
