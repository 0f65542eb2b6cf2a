"""Writes plain values as YAML 1.2 that every parser reads alike. Loads no library.

Strings and keys that are not plainly words stand in JSON's double quotes, which YAML 1.2 reads as
JSON does (YAML 1.2.2, section 1.2); so no word is ever taken for a number, a date or a truth value.
Strings of several lines are literal blocks, for people, where that loses nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TypeAlias

Plain: TypeAlias = "bool | int | str | list[Plain] | dict[str, Plain] | None"

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*\Z")
_NOT_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
"""Truth values and nothing, as YAML 1.1 reads them, in any case."""
_BLOCK = re.compile(r"[\x20-\x7e\xa0-\u2027\u2030-\ud7ff]*\Z")


def to_yaml(value: Plain) -> str:
    """One document, with a newline at its end."""
    return "\n".join(_lines(value)) + "\n"


def to_documents(values: list[Plain]) -> str:
    """Several documents in one file."""
    return "---\n".join(map(to_yaml, values))


def _lines(value: Plain) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from _below(f"{_string(key)}:", each)
    elif isinstance(value, list) and value:
        for each in value:
            first, *rest = _lines(each)
            yield f"- {first}"
            yield from (f"  {line}" if line else "" for line in rest)
    elif isinstance(value, str) and _is_block(value):
        yield "|-"  # no newline at its end
        yield from (f"  {line}" if line else "" for line in value.split("\n"))
    else:
        yield _string(value) if isinstance(value, str) else json.dumps(value)


def _below(head: str, value: Plain) -> Iterator[str]:
    """A key with its value: on the same line where it is one, else indented below."""
    first, *rest = _lines(value)
    if isinstance(value, str) or not isinstance(value, list | dict) or not value:
        yield f"{head} {first}"
        yield from rest
        return
    yield head
    yield from (f"  {line}" if line else "" for line in (first, *rest))


def _string(text: str) -> str:
    if _WORD.match(text) and text.lower() not in _NOT_WORDS:
        return text
    return '"' + "".join(map(_character, text)) + '"'


def _character(one: str) -> str:
    """As JSON writes it, but whole where JSON makes two halves of what lies beyond 16 bits."""
    return json.dumps(one)[1:-1] if one <= "\uffff" else f"\\U{ord(one):08x}"


def _is_block(text: str) -> bool:
    """Whether a literal block keeps it as it is: printable lines, none blank at either end."""
    lines = text.split("\n")
    edges = all(line and not line[0].isspace() for line in (lines[0], lines[-1]))
    return len(lines) > 1 and edges and all(_BLOCK.match(line) for line in lines)
