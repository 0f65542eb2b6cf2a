"""JSON from files that anybody may have written: what is odd in it is one kind of error."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

_DEEPEST = 64
"""Objects and arrays in each other; more would exhaust the stack of whoever walks through them."""
_LARGEST = 2**63
"""Whole numbers are below it: they are counts and steps."""


def parse_json(text: str | bytes) -> Any:
    """The value that a JSON text stands for.

    Raises:
        ValueError: it is not JSON in UTF-8, or it is what no writer of ours makes: a name twice in
            one object, NaN or infinity, a whole number of 64 bits or more, or very deep.
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_whole,
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None
    _require_shallow(value)
    return value


def _object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:80]!r} is there twice")
        found[name] = value
    return found


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _whole(text: str) -> int:
    if len(text) > 20 or abs(value := int(text)) >= _LARGEST:
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _require_shallow(value: Any) -> None:
    level = [value]
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                below += each.values()
            elif isinstance(each, list):
                below += each
        level = below
        if not level:
            return
    raise ValueError("nested too deeply")
