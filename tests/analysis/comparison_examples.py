"""Run folders made of events alone: known losses, no training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from armillary.foundation.run_folder import RECIPE_FILE
from armillary.recipe.recipe import Recipe
from armillary.recipe.registry import get
from armillary.recipe.toml import to_toml
from armillary.telemetry.events import EventLog
from telemetry_examples import start, step, validation

STEPS = 40


def fall(step: int) -> float:
    """A loss that falls as losses do."""
    return 2.0 + 3.0 / (1.0 + 0.3 * step)


def write_run(
    folder: Path,
    *,
    seed: int = 0,
    bits: float | None = 2.0,
    loss: Callable[[int], float] = fall,
    recipe: Recipe | None = None,
    exit_code: int | None = 0,
    seconds: float = 0.5,
    **changes: Any,
) -> Path:
    """A run of `STEPS` steps with four looks on the way.

    Args:
        bits: of the held-out text at the end; None: there was none.
        exit_code: None: it has not ended.
        changes: of the `start` event.
    """
    folder.mkdir(parents=True)
    recipe = replace(recipe or get("debug"), seed=seed)
    (folder / RECIPE_FILE).write_text(to_toml(recipe))
    fields = {"total_steps": STEPS, "corpus_fingerprint": "c0", "seed": seed, "recipe": "debug"}
    with EventLog(folder / "events.jsonl") as log:
        log.emit("start", 0, **start(**(fields | changes)))
        for number in range(1, STEPS + 1):
            log.emit("step", number, **step(number, loss=loss(number), step_seconds=seconds))
            if number % 10 == 0 and bits is not None:
                log.emit("validation", number, **validation(bits_per_byte=bits + 1.0 / number))
        if bits is not None:
            final = validation(name="final-validation", bits_per_byte=bits, bytes=90_000)
            log.emit("validation", STEPS, **final)
        if exit_code is not None:
            log.emit("stop", STEPS, reason="finished", exit_code=exit_code)
    return folder


def write_group(
    folder: Path, name: str, losses: list[float], recipe: Recipe | None = None, **changes: Any
) -> list[Path]:
    """Runs of one recipe that end with these bits per byte, one a seed."""
    return [
        write_run(folder / f"{name}-{seed}", seed=seed, bits=bits, recipe=recipe, **changes)
        for seed, bits in enumerate(losses)
    ]


def with_rate(rate: float) -> Recipe:
    """The debug recipe at another learning rate."""
    debug = get("debug")
    return replace(debug, optimizer=replace(debug.optimizer, lr=rate))
