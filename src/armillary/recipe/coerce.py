"""One rule for what a written value means, for the command line and for TOML alike."""

from __future__ import annotations

import enum
import re
import tomllib
import typing
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from armillary.foundation.component import choices_of, is_slot
from armillary.recipe.fields import (
    element_of,
    fields_of,
    group_in,
    is_literal,
    is_open_list,
    is_optional,
    list_in,
    members,
)

NONE_WORD = "none"
_LARGEST_EXPONENT = 30  # a whole number beyond 1e30 is a slip of the keyboard


class Mismatch(ValueError):
    """A written value does not fit its field. The text says what would."""


def coerce(value: object, annotation: Any, *, text: bool) -> Any:
    """The value of type `annotation` that `value` stands for.

    With `text`, the value comes from a command line, so numbers, booleans and lists are read out
    of strings. Without, it comes from TOML, which has types of its own.

    Raises:
        Mismatch: it stands for none.
    """
    if text and any("\ud800" <= character <= "\udfff" for character in str(value)):
        raise Mismatch("text in UTF-8")  # a command line's bytes that are none come as surrogates
    kinds = members(annotation)
    if is_optional(annotation):
        if value is None or (isinstance(value, str) and value.strip().lower() == NONE_WORD):
            return None
        if isinstance(value, str) and str in kinds:
            value = _unescape_none(value)
    last_word = [kind for kind in kinds if kind is str]  # text fits everything: try it last
    for kind in [kind for kind in kinds if kind not in (str, type(None))] + last_word:
        try:
            return _coerce_one(value, kind, text=text)
        except Mismatch:
            continue
    raise Mismatch(describe(annotation))


def escape_none(value: str) -> str:
    """How text that reads `none` is written in an optional field, so that it stays text."""
    return "\\" + value if re.fullmatch(r"\\*none", value.strip(), re.IGNORECASE) else value


def _unescape_none(value: str) -> str:
    return value[1:] if re.fullmatch(r"\\+none\s*", value, re.IGNORECASE) else value


def _coerce_one(value: object, kind: Any, *, text: bool) -> Any:
    if kind in _READERS:
        return _READERS[kind](value, text)
    if is_literal(kind):
        return _choice(value, {_written(option): option for option in typing.get_args(kind)}, text)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _choice(value, {enum_word(option): option for option in kind}, text)
    if list_in(kind) is not None:
        return _list(value, kind, text=text)
    raise Mismatch(describe(kind))


def _boolean(value: object, text: bool) -> bool:
    if isinstance(value, bool):
        return value
    if text and isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise Mismatch(describe(bool))


def _whole_number(value: object, text: bool) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) or (text and isinstance(value, str)):
        if re.fullmatch(r"\s*[+-]?\d+(_\d+)*\s*", str(value)):
            return int(str(value))
        try:
            number = Decimal(str(value).strip())
        except InvalidOperation:
            raise Mismatch(describe(int)) from None
        if number.is_finite() and number.adjusted() <= _LARGEST_EXPONENT and number == int(number):
            return int(number)
    raise Mismatch(describe(int))


def _number(value: object, text: bool) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise Mismatch(describe(float))
    if isinstance(value, str) and not text:
        raise Mismatch(describe(float))
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise Mismatch(describe(float)) from None


def _text(value: object, text: bool) -> str:
    if isinstance(value, str):
        return value
    raise Mismatch(describe(str))


def _path(value: object, text: bool) -> Path:
    return Path(_text(value, text))


_READERS: dict[Any, Callable[[object, bool], Any]] = {
    bool: _boolean,
    int: _whole_number,
    float: _number,
    str: _text,
    Path: _path,
}


def _choice(value: object, options: dict[str, Any], text: bool) -> Any:
    for word, option in options.items():
        plain = _plain_option(option)
        if (text and value == word) or (type(value) is type(plain) and value == plain):
            return option
    raise Mismatch("one of " + ", ".join(options))


def _list(value: object, kind: Any, *, text: bool) -> tuple[Any, ...]:
    if text and isinstance(value, str):
        written = value.strip()
        if written.startswith("["):
            try:
                value, text = tomllib.loads(f"list = {written}")["list"], False
            except tomllib.TOMLDecodeError:
                raise Mismatch(describe(kind)) from None
        elif "," in written or element_of(kind, 0) is not str:
            value = [part.strip() for part in written.split(",")] if written else []
        else:  # a single text keeps its spaces: a prompt may end in one
            value = [value] if written else []
    if not isinstance(value, list | tuple):
        raise Mismatch(describe(kind))
    if not is_open_list(kind) and len(value) != len(typing.get_args(kind)):
        raise Mismatch(describe(kind))
    return tuple(
        coerce(part, element_of(kind, index), text=text) for index, part in enumerate(value)
    )


def mismatch_of(value: object, annotation: Any) -> str | None:
    """What would fit where a value that a program has put there does not; None where it fits."""
    group = group_in(annotation)
    if group is not None and value is not None:
        return None if isinstance(value, group) else f"an object of a {group.__name__} class"
    if isinstance(value, tuple | list) and list_in(annotation) is not None:
        kinds = list_in(annotation)
        if is_open_list(kinds) or len(value) == len(typing.get_args(kinds)):
            parts = [mismatch_of(part, element_of(kinds, i)) for i, part in enumerate(value)]
            return None if not any(parts) else describe(annotation)
        return describe(annotation)
    kinds = [kind for kind in members(annotation) if isinstance(kind, type)]
    if isinstance(value, enum.Enum | Path) and isinstance(value, tuple(kinds)):
        return None
    try:
        coerce(value, annotation, text=False)
    except Mismatch as mismatch:
        return str(mismatch)
    return None


def enum_word(option: enum.Enum) -> str:
    """How an enum member is written: its value where that is text, else its name."""
    return option.value if isinstance(option.value, str) else option.name


def _plain_option(option: object) -> object:
    return enum_word(option) if isinstance(option, enum.Enum) else option


def _written(option: object) -> str:
    return str(option).lower() if isinstance(option, bool) else str(option)


_WORDS = {
    bool: ("true or false", "true|false", "values true or false"),
    int: ("a whole number", "INT", "whole numbers"),
    float: ("a number", "NUMBER", "numbers"),
    str: ("text", "TEXT", "texts"),
    Path: ("a path", "PATH", "paths"),
}


def describe(annotation: Any) -> str:
    """What fits, in words: `a whole number or none`."""
    words = [_describe_one(kind) for kind in members(annotation) if kind is not type(None)]
    return " or ".join([*words, "none"] if is_optional(annotation) else words)


def _describe_one(kind: Any) -> str:
    options = options_of(kind)
    if options:
        return "one of " + ", ".join(options)
    if kind not in _WORDS and list_in(kind) is None:
        return f"fields of its own ({', '.join(fields_of(kind))})"
    return _WORDS[kind][0] if kind in _WORDS else _describe_list(kind)


def _describe_list(kind: Any) -> str:
    parts = typing.get_args(kind)
    element = element_of(kind, 0)
    if group_in(element) is not None:
        return "a list of groups, set by number: .0.FIELD, .1.FIELD"
    if not is_open_list(kind) and (len({*parts}) > 1 or element not in _WORDS):
        return f"{len(parts)} values, separated by commas ({', '.join(map(describe, parts))})"
    many = _WORDS[element][2] if element in _WORDS else f"values, each {describe(element)}"
    count = "" if is_open_list(kind) else f"{len(parts)} "
    return f"{count}{many}, separated by commas"


def short_type(annotation: Any) -> str:
    """What fits, for a line of help: `INT|none`."""
    words = [_short_one(kind) for kind in members(annotation) if kind is not type(None)]
    return "|".join([*words, "none"] if is_optional(annotation) else words)


def _short_one(kind: Any) -> str:
    if kind in _WORDS:
        return _WORDS[kind][1]
    options = options_of(kind)
    if options:
        return "|".join(options)
    if list_in(kind) is None:
        return "GROUP"
    if is_open_list(kind):
        return f"{short_type(element_of(kind, 0))},..."
    return ",".join(short_type(part) for part in typing.get_args(kind))


def options_of(annotation: Any) -> list[str]:
    """The words to choose from, for slots, literals and enums; none for other types."""
    options: list[str] = []
    for kind in members(annotation):
        if is_slot(kind):
            options += sorted(choices_of(kind))
        elif is_literal(kind):
            options += [_written(option) for option in typing.get_args(kind)]
        elif isinstance(kind, type) and issubclass(kind, enum.Enum):
            options += [enum_word(option) for option in kind]
    return options
