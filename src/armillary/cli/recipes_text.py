"""Recipes listed and explained, for people."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from armillary.cli.table import table
from armillary.telemetry.format import quantity

_TITLES = {"source": "source", "default": "default", "recipe": "no source", "set": "set here"}
_FAMILIES = ("first run", "llama3", "qwen3", "deepseek", "gpt-oss", "fine-tuning", "debug")
"""In this order; others follow by name."""


def listing(rows: Sequence[dict[str, Any]]) -> str:
    """The table of each family, and what to type next."""
    parts = [_family(name, rows) for name in families(rows)]
    told = (
        "memory: of each GPU, estimated, for GPUs of 80 GB\n"
        "recipes for GPUs need the family's tokenizer: --data.tokenizer.path TOKENIZER.JSON\n"
        "armillary recipes show NAME --explain    each value and its source"
    )
    return "\n\n".join([*parts, told])


def families(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Families of the rows, in the order in which they are listed."""
    there = {row["family"] for row in rows}
    known = [name for name in _FAMILIES if name in there]
    return known + sorted(there - set(known))


def _family(name: str, rows: Sequence[dict[str, Any]]) -> str:
    cells = [
        (
            f"  {row['name']}",
            hardware(row["gpus"]),
            quantity(row["parameters"]),
            quantity(row["tokens"]),
            "" if row["gpu_bytes"] is None else f"{row['gpu_bytes'] / 1e9:.0f} GB",
            row["description"],
        )
        for row in rows
        if row["family"] == name
    ]
    header = ("  recipe", "for", "parameters", "tokens", "memory", "what it is")
    return f"{name}\n" + table(header, cells, ("  recipe", "for", "what it is"))


def hardware(gpus: int | None) -> str:
    """What a recipe is made for, in words."""
    if not gpus:
        return "any GPUs" if gpus is None else "CPU"
    return "1 GPU" if gpus == 1 else f"{gpus:,} GPUs"


def explanation(facts: dict[str, Any]) -> str:
    """Each value of a recipe with where it comes from, in groups."""
    lines = [facts["name"], *(_wrapped(facts["description"], "") if facts["description"] else [])]
    if facts["memory"]:
        lines += ["", *_memory(facts)]
    group = None
    for leaf in facts["leaves"]:
        if leaf["leaf"].partition(".")[0] != group:
            group = leaf["leaf"].partition(".")[0]
            lines.append("")
        lines.append(f"{leaf['leaf']} = {shown(leaf['value'])}")
        lines += _wrapped(f"{_TITLES[leaf['from']]}: {leaf['reason']}".rstrip(": "), "    ")
    counts = {
        title: sum(leaf["from"] == origin for leaf in facts["leaves"])
        for origin, title in _TITLES.items()
    }
    told = ", ".join(f"{count} {title}" for title, count in counts.items() if count)
    return "\n".join([*lines, "", f"{len(facts['leaves'])} values: {told}"])


def _memory(facts: dict[str, Any]) -> list[str]:
    parts = facts["memory"]
    listed = ", ".join(f"{name} {value / 1e9:.1f}" for name, value in parts.items())
    total = sum(parts.values()) / 1e9
    text = f"on {hardware(facts['gpus'])}, estimated {total:.0f} GB each: {listed}"
    return _wrapped(f"{text} (what these are: docs/recipes.md)", "")


def shown(value: Any) -> str:
    """A value as it is typed."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(map(str, value)) if value else "none at all"
    return str(value) if value != "" else '""'


def _wrapped(text: str, indent: str) -> list[str]:
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    more = f"{indent}    " if indent else ""
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=more)
