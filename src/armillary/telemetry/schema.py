"""The schema of `events.jsonl`: kinds and fields, versioned. `docs/events.md` explains it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from armillary.foundation.errors import nearest

SCHEMA_VERSION = 1
"""Raised when a field changes its meaning or goes; new kinds and fields do not raise it."""

COMMON = ("time", "kind", "rank", "step")
"""Fields of every event."""

REQUIRED: dict[str, tuple[str, ...]] = {
    "start": (
        "world_size",
        "mesh",
        "parameters",
        "flops_per_token",
        "flops_per_token_noncausal",
        "versions",
        "seed",
        "resumed_from",
    ),
    "step": (
        "loss",
        "gradient_norm",
        "learning_rate",
        "tokens",
        "tokens_total",
        "samples",
        "step_seconds",
        "data_seconds",
        "tokens_per_second",
        "mfu",
        "mfu_noncausal",
        "memory_peak_bytes",
    ),
    "validation": ("name", "loss", "bits_per_byte", "tokens"),
    "evaluation": ("task", "metric", "value", "items", "seconds"),
    "checkpoint": ("state", "path", "bytes", "seconds"),
    "warning": ("message", "where", "hint"),
    "error": ("message", "where", "hint"),
    "stop": ("reason", "exit_code"),
    "message": ("message",),
    "rewind": ("message", "to_step", "samples", "rewinds"),
    "stage": ("name", "index", "first_step", "last_step", "set", "data_fingerprint"),
    "ranks": ("steps", "slowest", "slowest_over_median", "busy_seconds"),
    "sample": ("prompt", "text"),
    "profile": ("path", "first_step", "last_step"),
}
"""Required fields by kind; further fields are allowed."""

OPTIONAL: dict[str, tuple[str, ...]] = {
    "start": (
        "schema",
        "host",
        "pid",
        "recipe",
        "device",
        "total_steps",
        "peak_flops",
        "trained_parameters",
        "checkpoint_every",
        "data_fingerprint",
        "corpus_fingerprint",
        "restart",
    ),
    "step": (
        "epoch",
        "sample_ids",
        "skipped",
        "gradient_norms",
        "expert_load_max_over_mean",
        "expert_idle_share",
        "expert_bias_mean_absolute",
        "forward_backward_seconds",
        "optimizer_seconds",
        "checkpoint_seconds",
        "other_seconds",
    ),
    "stage": (
        "cursor",
        "seq_len",
        "mesh",
        "corpus_fingerprint",
        "flops_per_token",
        "flops_per_token_noncausal",
    ),
    "ranks": (
        "slowest_host",
        "step_seconds",
        "data_seconds",
        "garbage_seconds",
        "checkpoint_seconds",
    ),
    "validation": ("bytes", "seconds"),
    "evaluation": ("error",),
    "checkpoint": ("message", "hint", "tries", "superseded"),
    "stop": ("seconds", "seconds_from_signal"),
    "message": ("gzip_each", "gzip_all", "xz_all"),
}
"""Fields that are documented and may be absent."""

CHECKPOINT_STATES = ("staged", "durable", "failed", "removed")


def checked_event(
    kind: str, *, time: float, rank: int, step: int, fields: Mapping[str, object]
) -> dict[str, Any]:
    """One event, complete and ready for JSON.

    A number that JSON cannot say (NaN, infinities) becomes null, and `nonfinite` names it:
    `{"loss": null, "nonfinite": {"loss": "nan"}}`.

    Raises:
        ValueError: an unknown kind, a required field that is absent, or a name that is taken.
    """
    if kind not in REQUIRED:
        raise ValueError(f"unknown event kind {kind!r}; nearest: {nearest(kind, REQUIRED)}")
    missing = [name for name in REQUIRED[kind] if name not in fields]
    if missing:
        raise ValueError(f"event {kind!r} lacks {', '.join(missing)}")
    if kind == "checkpoint" and fields["state"] not in CHECKPOINT_STATES:
        raise ValueError(f"checkpoint state {fields['state']!r} is none of {CHECKPOINT_STATES}")
    taken = [name for name in COMMON if name in fields]
    if taken:
        raise ValueError(f"event {kind!r} may not set {', '.join(taken)}")
    nonfinite: dict[str, str] = {}
    event: dict[str, Any] = {"time": time, "kind": kind, "rank": rank, "step": step}
    for name, value in fields.items():
        event[name] = _plain(value, name, nonfinite)
    if nonfinite:
        event["nonfinite"] = nonfinite
    return event


def _plain(value: object, path: str, nonfinite: dict[str, str]) -> Any:
    """The value in JSON's types; numbers of other libraries become Python's, exactly."""
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return _finite(float(value), path, nonfinite)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{path}.{key}", nonfinite) for key, item in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [_plain(item, f"{path}.{index}", nonfinite) for index, item in enumerate(value)]
    return (
        str(value) if isinstance(value, PurePath) else _plain(_item(value, path), path, nonfinite)
    )


def _item(value: object, path: str) -> object:
    """The Python number in a scalar of numpy or torch."""
    item = getattr(value, "item", None)
    if not callable(item):
        raise TypeError(f"event field {path}: JSON cannot hold a {type(value).__name__}")
    return item()


def _finite(value: float, path: str, nonfinite: dict[str, str]) -> float | None:
    if math.isfinite(value):
        return value
    nonfinite[path] = repr(value)
    return None
