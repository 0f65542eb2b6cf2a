"""A comparison as one JSON document; `docs/compare.md` describes it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from armillary.analysis.comparison import Comparison, curve_of
from armillary.analysis.contenders import ABSENT, BITS, LOSS, Contender
from armillary.analysis.curves import AXES, SMOOTHING, band_of
from armillary.analysis.runs import Run
from armillary.analysis.scaling import FURTHER, ScalingFit
from armillary.analysis.significance import ALPHA, POWER
from armillary.analysis.student import Mean, mean_of
from armillary.analysis.verdict import verdict_of, words_of

SCHEMA = 1
_CURVE_POINTS = 100


def document_of(comparison: Comparison) -> dict[str, Any]:
    """All figures as JSON values; what is not known, or is not finite, is null."""
    verdict = verdict_of(comparison)
    document = {
        "schema": SCHEMA,
        "title": comparison.title,
        "verdict": {"kind": verdict.kind, "text": verdict.text, "figure": comparison.figure},
        "rules": {"alpha": ALPHA, "power": POWER, "smoothing": SMOOTHING, "confidence": 0.95},
        "comparable": {
            BITS: comparison.comparable.bits,
            LOSS: comparison.comparable.loss,
            "why_not": comparison.comparable.why,
        },
        "recipes": [_contender(comparison, each) for each in comparison.contenders],
        "pairs": [_pair(comparison, place) for place in range(len(comparison.pairs))],
        "at_equal": [
            {
                "axis": equal.axis,
                "figure": equal.figure,
                "point": equal.point,
                "means": [_mean(mean) for mean in equal.means],
            }
            for equal in comparison.equals
        ],
        "target": _target(comparison),
        "differences": [
            {"leaf": row.name, "values": [None if v is ABSENT else v for v in row.values]}
            for row in comparison.leaves
        ],
        "scaling": None if comparison.fit is None else _fit(comparison.fit),
        "notes": list(comparison.notes),
    }
    plain: dict[str, Any] = _finite(document)
    return plain


def _contender(comparison: Comparison, contender: Contender) -> dict[str, Any]:
    figures = {
        BITS: BITS,
        LOSS: LOSS,
        "tokens_per_second": "tokens_per_second",
        "memory_bytes": "memory_bytes",
        "seconds": "seconds",
    }
    evaluations = sorted({name for run in contender.runs for name in run.evaluations})
    return {
        "key": contender.key,
        "name": contender.name,
        "runs": [_run(comparison, run) for run in contender.runs],
        "means": {name: _mean(mean_of(contender.values(at))) for name, at in figures.items()},
        "cost": _mean(mean_of(contender.values(comparison.cost))),
        "evaluations": {
            name: _mean(mean_of(contender.values(partial(_evaluation, name))))
            for name in evaluations
        },
        "curves": {
            figure: {axis: _curve(contender, figure, axis) for axis in AXES}
            for figure in (BITS, LOSS)
        },
    }


def _evaluation(name: str, run: Run) -> float | None:
    return run.evaluations.get(name)


def _run(comparison: Comparison, run: Run) -> dict[str, Any]:
    names = (
        "seed", "outcome", "reason", "steps", "tokens", "parameters", "flops_per_token", "seconds",
        "look_seconds", "tokens_per_second", "memory_bytes", "world_size", "device",
        "bits_per_byte", "loss",
    )  # fmt: skip
    cost = {"cost": comparison.cost(run)}
    return {"folder": str(run.folder)} | {name: getattr(run, name) for name in names} | cost


def _curve(contender: Contender, figure: str, axis: str) -> dict[str, Any] | None:
    band = band_of([curve_of(run, figure) for run in contender.runs], axis, _CURVE_POINTS)
    return None if band is None else band.plain()


def _pair(comparison: Comparison, place: int) -> dict[str, Any]:
    pair = comparison.pairs[place]
    names = (
        "first", "second", "test", "counts", "difference", "interval", "p", "adjusted_p",
        "detectable", "significant", "reason",
    )  # fmt: skip
    return {name: getattr(pair, name) for name in names} | {"words": words_of(pair, comparison)}


def _target(comparison: Comparison) -> dict[str, Any] | None:
    target = comparison.target
    if target is None:
        return None
    return {
        "figure": target.figure,
        "value": target.value,
        "given": target.given,
        "reached": [
            {"runs": each.runs} | {axis: _mean(mean) for axis, mean in each.means.items()}
            for each in target.reached
        ],
    }


def _fit(fit: ScalingFit) -> dict[str, Any]:
    return {
        "form": "E + A (C / C0)^-alpha",
        "e": fit.curve.e,
        "a": fit.curve.a,
        "alpha": fit.curve.alpha,
        "c0": fit.curve.c0,
        "intervals": fit.intervals,
        "further": {"factor": FURTHER, "loss": fit.further},
        "points": [
            {"flops": compute, "loss": loss, "residual": residual}
            for compute, loss, residual in zip(
                fit.compute.tolist(), fit.losses.tolist(), fit.residuals.tolist(), strict=True
            )
        ],
        "remarks": list(fit.remarks),
    }


def _mean(mean: Mean | None) -> dict[str, Any] | None:
    if mean is None:
        return None
    return {"mean": mean.value, "runs": mean.count, "half_width": mean.half_width}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
