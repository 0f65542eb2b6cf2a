"""What torch's flight recorder knows of the collectives that this process has begun.

It is torch's private interface, so this is the only module that knows it; where a release has
another, nothing is known, and no more than that is lost.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

ENTRIES = 2000
"""Collectives that are remembered."""

_SIZE = "TORCH_FR_BUFFER_SIZE"
_NEEDED = {"process_group", "collective_seq_id", "profiling_name", "retired", "state"}
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""The newest first; all take `includeCollectives` and `onlyActive`, and return JSON."""


def enable() -> None:
    """Has the recorder remember collectives, unless the user chose how many; before the first."""
    os.environ.setdefault(_SIZE, str(ENTRIES))


def dump() -> bytes:
    """All that is remembered, as JSON; empty: nothing."""
    dumping = _dumping()
    try:
        return dumping() if dumping is not None else b""
    except (RuntimeError, TypeError):  # another release, or a build without it
        return b""


def begun() -> Mapping[str, int]:
    """How many collectives this process has begun, by name of the group."""
    counts: dict[str, int] = {}
    for entry in _entries():
        group = _group(entry)
        counts[group] = max(counts.get(group, 0), int(entry["collective_seq_id"]))
    return counts


def unfinished() -> list[str]:
    """The collectives that this process has begun and that have not ended, in order."""
    return [
        f"{entry['profiling_name']}, number {entry['collective_seq_id']} of {_group(entry)}"
        for entry in _entries()
        if not entry["retired"] and entry["state"] != "completed"
    ]


def _entries() -> list[dict[str, Any]]:
    """What is remembered, oldest first, as far as it is complete."""
    try:
        found = json.loads(dump() or b"{}").get("entries", [])
        return [entry for entry in found if entry.keys() >= _NEEDED]
    except (ValueError, AttributeError):
        return []


def _group(entry: Mapping[str, Any]) -> str:
    name, description = entry["process_group"]
    return f"{description} {name}"


def _dumping() -> Callable[[], bytes] | None:
    try:
        from torch._C import _distributed_c10d as native
    except ImportError:
        return None
    return next((getattr(native, name) for name in _DUMPS if hasattr(native, name)), None)
