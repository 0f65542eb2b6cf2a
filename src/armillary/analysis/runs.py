"""One run as a comparison sees it: what it was, how it ended, and its curves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from armillary.analysis.curves import SMOOTHING, Curve, Floats, smoothed
from armillary.foundation.errors import ArmillaryError, Problem, UserError
from armillary.foundation.run_folder import EVENTS_FILE, RECIPE_FILE
from armillary.recipe.overrides import apply
from armillary.recipe.recipe import Recipe
from armillary.recipe.toml import read_toml
from armillary.telemetry.history import History, read_history

FINISHED, DIVERGED, FAILED, UNFINISHED = "finished", "diverged", "failed", "unfinished"
_FINAL = "final-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """What decides whether losses of two runs are about the same thing."""

    corpus: tuple[str, ...]
    """Fingerprints of the documents, one a stage, whatever the tokenizer; empty: not known."""
    held_out: tuple[tuple[str, float | None], ...]
    """Each set that was scored at the end, and its bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run, from its events."""

    folder: Path
    seed: int | None
    outcome: str
    """`finished`, `diverged`, `failed` or `unfinished`; the first alone has a result."""
    reason: str
    """More about it, in words; may be empty."""
    steps: int
    tokens: float
    parameters: float | None
    flops_per_token: float | None
    """Over all its stages."""
    seconds: float
    """Of all steps."""
    look_seconds: float
    """Of all looks at held-out text."""
    tokens_per_second: float | None
    """Median over the steps."""
    memory_bytes: float | None
    """Most that rank 0 held."""
    world_size: int | None
    device: str | None
    bits_per_byte: float | None
    """Of all held-out text, at the end."""
    loss: float | None
    """Training loss over the last `SMOOTHING` of the tokens, nats per token."""
    training: Curve
    looks: Curve
    """Bits per byte of held-out text, during the run."""
    text: Text
    evaluations: Mapping[str, float]
    """Figures of the recipe's evaluation tasks, the last of each, by `task metric`."""


def read_run(folder: Path, ended: int | None = None) -> Run:
    """A run from its folder.

    Args:
        ended: the exit code of its last process, where that is known; a killed one cannot tell.

    Raises:
        UserError: the folder holds no events, or they are broken.
    """
    try:
        history = read_history(folder)
    except ArmillaryError as error:
        raise UserError(error.problems) from None
    except (OSError, ValueError) as error:
        raise UserError(_unreadable(folder, error)) from None
    try:
        return _run_of(history, ended)
    except (
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
    ) as error:  # fields that no writer of ours writes
        raise UserError(_unreadable(folder, error)) from None


def _unreadable(folder: Path, error: Exception) -> Problem:
    return Problem(
        f"{folder / EVENTS_FILE}: not the events of a run: {error}",
        "a folder that `armillary train --run` has written",
        "armillary runs list",
    )


def recipe_of(folder: Path) -> Recipe | None:
    """The recipe in a run folder; None where this version cannot read it."""
    try:
        return apply(Recipe(), [read_toml(folder / RECIPE_FILE)])
    except ArmillaryError:
        return None


def _run_of(history: History, ended: int | None) -> Run:
    start = history.start or {}
    steps = [history.steps[number] for number in sorted(history.steps)]
    final = _final_looks(history)
    training = _training_curve(history, steps)
    last = float(training.values[-1]) if training.values.size else math.nan
    tokens = float(history.tokens_total or 0)
    bits = bits_of(final)
    outcome, reason = _outcome(history, ended, last, bits)
    has_result = outcome == FINISHED
    seed, world_size, device = start.get("seed"), start.get("world_size"), start.get("device")
    return Run(
        folder=history.folder,
        seed=seed if isinstance(seed, int) else None,
        outcome=outcome,
        reason=reason,
        steps=history.last_step,
        tokens=tokens,
        parameters=_number(start.get("parameters")),
        flops_per_token=_number(training.flops[-1] / tokens) if steps and tokens else None,
        seconds=math.fsum(_number(step.get("step_seconds")) or 0.0 for step in steps),
        look_seconds=math.fsum(
            _number(event.get("seconds")) or 0.0 for event in history.validations
        ),
        tokens_per_second=_median(step.get("tokens_per_second") for step in steps),
        memory_bytes=max(
            filter(None, (_number(step.get("memory_peak_bytes")) for step in steps)), default=None
        ),
        world_size=world_size if isinstance(world_size, int) else None,
        device=device if isinstance(device, str) else None,
        bits_per_byte=bits if has_result else None,
        loss=last if has_result and math.isfinite(last) else None,
        training=training,
        looks=_look_curve(history, training),
        text=Text(
            corpus=_corpus(history),
            held_out=tuple(sorted((event["name"], _number(event.get("bytes"))) for event in final)),
        ),
        evaluations=_evaluations(history),
    )


def _corpus(history: History) -> tuple[str, ...]:
    """A later start tells of its own stage alone, so those of a run with stages come from these."""
    said = [history.stages[place] for place in sorted(history.stages)] or [history.start or {}]
    found = [event.get("corpus_fingerprint") for event in said]
    return tuple(map(str, found)) if all(isinstance(each, str) for each in found) else ()


def _outcome(
    history: History, ended: int | None, last: float, bits: float | None
) -> tuple[str, str]:
    """How the run ended. Diverged: its loss, or that of held-out text, is not finite at the end."""
    finals = [event for event in history.validations if event["name"].startswith(_FINAL)]
    said = str((history.stop or {}).get("reason") or "")
    state = history.state()
    if history.steps and (not math.isfinite(last) or (history.loss is None and not finals)):
        return DIVERGED, "its loss is no longer finite"
    if finals and (bits is None or not math.isfinite(bits)):
        return DIVERGED, "its held-out loss is not finite"
    if state == "failed" or ended not in (None, 0, 75):
        return FAILED, said or f"exit code {ended}"
    if state != FINISHED:
        return UNFINISHED, "" if state == "empty" else state
    first = history.steps[min(history.steps)]["loss"] if history.steps else None
    if first is not None and last > first:
        return FINISHED, "ended above the loss that it began with"
    return FINISHED, ""


def _final_looks(history: History) -> list[dict[str, Any]]:
    """The last look at each whole held-out set."""
    last = history.last_validations()
    return [event for name, event in last.items() if name.startswith(_FINAL)]


def bits_of(looks: Iterable[Mapping[str, Any]]) -> float | None:
    """Bits per byte of all sets together, each weighted by its bytes; None where there is none."""
    found = [(_number(look["bits_per_byte"]), _number(look.get("bytes"))) for look in looks]
    if len(found) == 1:
        return found[0][0]
    total = bits = 0.0
    for value, size in found:
        if value is None or size is None:
            return None
        bits, total = bits + value * size, total + size
    return bits / total if total else None


def _training_curve(history: History, steps: list[dict[str, Any]]) -> Curve:
    tokens = _column(steps, "tokens_total")
    weights = np.maximum(np.diff(tokens, prepend=0.0), 0.0)
    seconds = np.cumsum(np.nan_to_num(_column(steps, "step_seconds")))
    return Curve(
        tokens=tokens,
        flops=np.cumsum(weights * _flops_per_token(history, steps)),
        seconds=seconds,
        values=smoothed(_column(steps, "loss"), weights, SMOOTHING),
    )


def _flops_per_token(history: History, steps: list[dict[str, Any]]) -> Floats:
    """[steps] as the stage of each has them: a longer context costs more."""
    costs = _column([history.start or {}], "flops_per_token").repeat(len(steps))
    numbers = np.array([step["step"] for step in steps])
    for stage in history.stages.values():
        inside = (numbers >= stage["first_step"]) & (numbers <= stage["last_step"])
        costs[inside] = _column([stage], "flops_per_token")
    return costs


def _look_curve(history: History, training: Curve) -> Curve:
    """Looks stand where the step that they follow ended."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for event in history.validations:
        if not event["name"].startswith(_FINAL):
            by_step.setdefault(event["step"], []).append(event)
    places = {number: place for place, number in enumerate(sorted(history.steps))}
    known = [step for step in sorted(by_step) if step in places]
    rows = np.array([places[step] for step in known], dtype=np.int64)
    bits = [bits_of({event["name"]: event for event in by_step[step]}.values()) for step in known]
    return Curve(
        tokens=training.tokens[rows],
        flops=training.flops[rows],
        seconds=training.seconds[rows],
        values=np.array([math.nan if value is None else value for value in bits]),
    )


def _evaluations(history: History) -> dict[str, float]:
    last = history.last_evaluations()
    figures = (
        (task, name, each) for task, metrics in last.items() for name, each in metrics.items()
    )
    found = {f"{task} {name}": _number(event["value"]) for task, name, event in figures}
    return {name: value for name, value in found.items() if value is not None}


def _column(steps: list[dict[str, Any]], name: str) -> Floats:
    values = (_number(step.get(name)) for step in steps)
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def _number(value: object) -> float | None:
    """The value as a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 else None


def _median(values: Iterable[object]) -> float | None:
    known = [number for value in values if (number := _number(value)) is not None]
    return float(np.median(known)) if known else None
