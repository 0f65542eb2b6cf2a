"""JSON lines, plain or compressed, in any place: read in ranges of bytes, one object a line."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from typing import Any

from armillary.data.corpus import Source, decode_text
from armillary.data.files import FoundFile, is_whole_only, open_content, unreadable
from armillary.foundation.errors import Problem

LONGEST_LINE = 1 << 28
"""Bytes; a longer one is refused rather than held in memory."""

_BLOCK_BYTES = 1 << 20


def line_sources(files: list[FoundFile]) -> list[Source]:
    """The files in ranges of bytes; compressed ones whole."""
    sources = []
    for file in files:
        sources += [file.source()] if is_whole_only(file.path) else file.ranges()
    return sources


def read_objects(
    source: Source, on_bad_text: str
) -> Iterator[tuple[int, dict[str, Any]] | Problem]:
    """The objects of the lines that begin in a source, with the bytes at which they do.

    Offsets count what is in a file, so of a compressed one they do not count its own bytes.

    Args:
        source: one of `line_sources`.
        on_bad_text: what to do with a line that is not UTF-8; see `decode_text`.
    """
    try:
        for offset, line in _lines(source):
            found = _object(source, offset, line.strip(), on_bad_text)
            if isinstance(found, Problem):
                yield found
            elif found is not None:
                yield offset, found
    except OSError as error:
        yield unreadable(source.path, error)


def place_of(source: Source, offset: int) -> str:
    """`file:line` of the line that begins at `offset`; counted only once something is wrong."""
    with open_content(source.path) as file:
        number, left = 1, offset
        while left > 0 and (block := file.read(min(left, _BLOCK_BYTES))):
            number += block.count(b"\n")
            left -= len(block)
    return f"{source.path}:{number}"


def json_kind(value: object) -> str:
    """What JSON calls a value."""
    if value is None:
        return "null"
    kinds = {dict: "object", list: "array", bool: "boolean", str: "string"}
    return kinds.get(type(value), "number")


def _object(
    source: Source, offset: int, line: bytes, on_bad_text: str
) -> dict[str, Any] | Problem | None:
    if not line:
        return None
    text = decode_text(line, source.path, on_bad_text, offset)
    if isinstance(text, Problem):  # say it again with the line's number, which costs a count
        return decode_text(line, place_of(source, offset), on_bad_text, offset)  # type: ignore[return-value]
    if text is None:
        return None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        return _no_object(f"{place_of(source, offset)} is not JSON: {error}")
    if not isinstance(record, dict):
        return _no_object(f"{place_of(source, offset)} is a JSON {json_kind(record)}")
    return record


def _no_object(message: str) -> Problem:
    return Problem(message, "one JSON object a line", "repair or remove the line")


def _lines(source: Source) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in [start, end), with the offsets at which they begin."""
    with open_content(source.path) as file:
        offset = source.start
        if offset > 0:  # the line under way belongs to the range in which it began
            file.seek(offset - 1)
            offset += len(_line(file, offset)) - 1
        while source.end < 0 or offset < source.end:
            line = _line(file, offset)
            if not line:
                return
            yield offset, line
            offset += len(line)


def _line(file: Any, offset: int) -> bytes:
    line: bytes = file.readline(LONGEST_LINE + 1)
    if len(line) > LONGEST_LINE:
        raise OSError(errno.EFBIG, f"the line at byte {offset} has more than {LONGEST_LINE} bytes")
    return line
