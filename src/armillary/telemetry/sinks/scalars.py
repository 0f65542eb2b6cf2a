"""Which numbers of an event the sinks plot, and under what names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = {
    "loss": "train/loss",
    "gradient_norm": "train/gradient_norm",
    "learning_rate": "train/learning_rate",
    "tokens_total": "train/tokens_total",
    "tokens_per_second": "speed/tokens_per_second",
    "mfu": "speed/mfu",
    "mfu_noncausal": "speed/mfu_noncausal",
    "step_seconds": "speed/step_seconds",
    "data_seconds": "speed/data_seconds",
    "forward_backward_seconds": "speed/forward_backward_seconds",
    "optimizer_seconds": "speed/optimizer_seconds",
    "checkpoint_seconds": "speed/checkpoint_seconds",
    "memory_peak_bytes": "memory/peak_bytes",
}


def scalars(event: Mapping[str, Any]) -> dict[str, float]:
    """Plottable numbers by name, of steps, validations and evaluations; nulls are left out."""
    if event["kind"] == "step":
        names = _NAMES
    elif event["kind"] == "validation":
        names = {field: f"{event['name']}/{field}" for field in ("loss", "bits_per_byte")}
    elif event["kind"] == "evaluation":
        names = {"value": f"{event['task']}/{event['metric']}"}
    else:
        return {}
    return {
        name: float(event[field]) for field, name in names.items() if event.get(field) is not None
    }
