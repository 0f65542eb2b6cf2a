"""Corpora of JSON lines: one document a line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from armillary.data.corpus import CorpusConfig, Document, Source, clean_text
from armillary.data.files import find_files
from armillary.data.lines import json_kind, line_sources, place_of, read_objects
from armillary.foundation.component import component
from armillary.foundation.errors import Problem, UserError


@component("jsonl")
@dataclass(frozen=True, kw_only=True, slots=True)
class JsonLines(CorpusConfig):
    """Files of JSON lines, plain, .gz, .bz2, .xz or .zst: one field of each is a document.

    A document's id is its file's name and the byte at which its line begins.
    """

    files: tuple[str, ...] = ()
    """Globs of paths, or of s3://, gs://, az:// or hf:// addresses; ** also matches folders."""
    field: str = "text"
    """Field of each object that holds the text."""
    on_bad_text: str = "error"
    """What to do with a line that is not UTF-8: error, replace (with U+FFFD) or skip."""

    def sources(self) -> list[Source]:
        """See `CorpusConfig.sources`."""
        if not self.field:
            raise UserError(Problem("data.corpus.field is empty", "the name of a field"))
        return line_sources(find_files(self.files))

    def read(self, source: Source) -> Iterator[Document | Problem]:
        """See `CorpusConfig.read`."""
        for found in read_objects(source, self.on_bad_text):
            if isinstance(found, Problem):
                yield found
                continue
            offset, record = found
            text = self._text_of(record, source, offset)
            if isinstance(text, Problem):
                yield text
            elif text is not None:
                yield Document(f"{source.name}@{offset}", text)

    def _text_of(self, record: dict[str, Any], source: Source, offset: int) -> str | Problem | None:
        if self.field not in record:
            names = ", ".join(sorted(map(str, record))) or "none"
            return Problem(
                f"{place_of(source, offset)} has no field {self.field!r}",
                f"fields of that line: {names}",
                "--data.corpus.field NAME",
            )
        value = record[self.field]
        if not isinstance(value, str):
            return Problem(
                f"{place_of(source, offset)}: field {self.field!r} is a JSON {json_kind(value)}",
                "a string",
                "--data.corpus.field NAME, or repair the line",
            )
        return clean_text(value, lambda: place_of(source, offset), self.on_bad_text)
