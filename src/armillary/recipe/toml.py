"""Recipes as TOML, with the doc of each field beside its value."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

from armillary.foundation.errors import Problem, UserError
from armillary.recipe.draft import KIND
from armillary.recipe.fields import fields_of
from armillary.recipe.overrides import TableLayer
from armillary.recipe.plain import leaf_value
from armillary.recipe.tree import is_group, kind_of

_NAMED = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def to_toml(tree: Any) -> str:
    """A complete TOML document of a config tree: every leaf, with its doc as a comment.

    Reading it back with `read_toml` and `overrides.apply` gives an equal tree.
    """
    lines: list[str] = []
    _write_group(tree, (), lines)
    return "\n".join(lines).strip() + "\n"


def _write_group(tree: Any, path: tuple[str, ...], lines: list[str]) -> None:
    """Leaves first: TOML gives a key below a table header to that table."""
    groups, lists = [], []
    for name, info in fields_of(type(tree)).items():
        value = getattr(tree, name)
        if is_group(value):
            groups.append((name, value))
        elif isinstance(value, tuple) and any(is_group(part) for part in value):
            lists.append((name, value))
        else:
            written = _inline(leaf_value(value, info.annotation))
            lines.append(f"{name} = {written}" + (f"  # {info.doc}" if info.doc else ""))
    for name, value in groups:
        _write_table(f"[{'.'.join((*path, name))}]", value, (*path, name), lines)
    for name, parts in lists:
        for part in parts:
            _write_table(f"[[{'.'.join((*path, name))}]]", part, (*path, name), lines)


def _write_table(header: str, tree: Any, path: tuple[str, ...], lines: list[str]) -> None:
    lines += ["", header]
    kind = kind_of(tree)
    if kind is not None:
        lines.append(f"{KIND} = {_inline(kind)}")
    _write_group(tree, path, lines)


def _inline(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + "".join(map(_character, value)) + '"'
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, int | float):
        return repr(value)
    assert isinstance(value, list), f"no way to write {type(value).__name__}"
    return "[" + ", ".join(map(_inline, value)) + "]"


def _character(character: str) -> str:
    if character in _NAMED:
        return _NAMED[character]
    if ord(character) < 0x20 or ord(character) == 0x7F:
        return f"\\u{ord(character):04x}"
    return character


def read_toml(file: Path | str) -> TableLayer:
    """The values of a TOML file.

    Raises:
        UserError: it cannot be read, or is not TOML; names the file and the line.
    """
    try:
        return TableLayer(tomllib.loads(Path(file).read_text("utf-8-sig")), f"in {file}")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(
            Problem(f"cannot read {file}: {reason}", "a TOML file of recipe values")
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            Problem(f"{file} is not TOML: {error}", "a TOML file of recipe values")
        ) from None
