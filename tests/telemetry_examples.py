"""Events for the tests of telemetry and of `armillary runs`: fixed times, fixed numbers."""

from __future__ import annotations

from typing import Any

BEGUN = 1_700_000_000.0


def start(**changes: Any) -> dict[str, Any]:
    """Fields of a `start` event."""
    return {
        "world_size": 1,
        "mesh": {"dp_shard": 1},
        "parameters": 3_300_000,
        "flops_per_token": 2.1e7,
        "flops_per_token_noncausal": 2.3e7,
        "versions": {"torch": "2.13.0"},
        "seed": 0,
        "resumed_from": None,
        "recipe": "starter",
        "total_steps": 200,
        "checkpoint_every": 50,
        "peak_flops": None,
    } | changes


def step(number: int, **changes: Any) -> dict[str, Any]:
    """Fields of a `step` event."""
    return {
        "loss": 8.0 / (1 + number / 20),
        "gradient_norm": 0.93,
        "learning_rate": 3e-4,
        "tokens": 4096,
        "tokens_total": 4096 * number,
        "samples": [16 * (number - 1), 16 * number],
        "step_seconds": 0.5,
        "data_seconds": 0.0015,
        "forward_backward_seconds": 0.4,
        "optimizer_seconds": 0.05,
        "checkpoint_seconds": 0.0,
        "other_seconds": 0.0485,
        "tokens_per_second": 8123.4,
        "mfu": 0.412,
        "mfu_noncausal": 0.45,
        "memory_peak_bytes": 1_288_490_188,
    } | changes


def validation(**changes: Any) -> dict[str, Any]:
    """Fields of a `validation` event."""
    return {"name": "validation", "loss": 3.1, "bits_per_byte": 1.632, "tokens": 50_000} | changes


def checkpoint(state: str = "durable", number: int = 20, **changes: Any) -> dict[str, Any]:
    """Fields of a `checkpoint` event."""
    path = f"checkpoints/step-{number:08d}"
    return {"state": state, "path": path, "bytes": 39_600_000, "seconds": 0.31} | changes


class Ticks:
    """A clock that moves by a fixed amount whenever it is read, or by hand."""

    def __init__(self, now: float = BEGUN, each: float = 0.0) -> None:
        self.now, self.each = now, each

    def __call__(self) -> float:
        self.now += self.each
        return self.now
