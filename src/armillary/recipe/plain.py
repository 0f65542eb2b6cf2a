"""Config trees as plain JSON data, and their fingerprint."""

from __future__ import annotations

import enum
import hashlib
import json
import math
from pathlib import Path
from typing import Any

from armillary.recipe.coerce import NONE_WORD, enum_word, escape_none
from armillary.recipe.draft import KIND
from armillary.recipe.fields import element_of, fields_of, is_optional, list_in, members
from armillary.recipe.tree import is_group, kind_of


def to_plain(tree: Any, *, where: bool = True) -> dict[str, Any]:
    """Nested dictionaries of JSON values; a component has its name under `kind`.

    Args:
        where: name components of the user's own with their file or module.
    """
    kind = kind_of(tree, where=where)
    plain: dict[str, Any] = {} if kind is None else {KIND: kind}
    for name, info in fields_of(type(tree)).items():
        plain[name] = _plain_value(getattr(tree, name), info.annotation, where)
    return plain


def _plain_value(value: Any, annotation: Any, where: bool) -> Any:
    if is_group(value):
        return to_plain(value, where=where)
    if isinstance(value, tuple) and any(map(is_group, value)):
        return [to_plain(part, where=where) for part in value]
    return None if value is None else _json(leaf_value(value, annotation))


def _json(value: Any) -> Any:
    if isinstance(value, list):
        return [_json(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def leaf_value(value: Any, annotation: Any) -> Any:
    """A leaf as bool, int, float, text or list: in the one way in which it is written.

    None is the word `none`; a number in a field of floats is a float, however it was given.
    """
    kinds = members(annotation)
    if isinstance(value, enum.Enum):
        value = enum_word(value)
    elif isinstance(value, Path):
        value = str(value)
    if value is None:
        return NONE_WORD
    if isinstance(value, tuple):
        parts = _element_annotations(annotation, len(value))
        return [leaf_value(part, kind) for part, kind in zip(value, parts, strict=True)]
    if isinstance(value, str) and is_optional(annotation) and str in kinds:
        return escape_none(value)
    if isinstance(value, int) and not isinstance(value, bool) and float in kinds:
        return value if int in kinds else float(value)
    return value


def _element_annotations(annotation: Any, length: int) -> list[Any]:
    elements = list_in(annotation)
    return [element_of(elements, index) for index in range(length)]


def recipe_sha256(tree: Any) -> str:
    """Fingerprint of a config tree: equal trees have equal ones, in whatever way they were made.

    It covers the values and the names of components, not the place of a user's own files.
    """
    text = json.dumps(to_plain(tree, where=False), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
