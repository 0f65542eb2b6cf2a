"""Runs as tables and pages of text, and as JSON. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from armillary.telemetry.format import UNKNOWN, byte_count, duration, number, percent, quantity
from armillary.telemetry.history import History
from armillary.telemetry.sparkline import sparkline
from armillary.telemetry.text import printable

_CURVE_WIDTH = 60
_MOST_WARNINGS = 10
_COLUMNS = ("name", "recipe", "steps", "loss", "bits/byte", "tokens", "state", "age")
_LEFT = ("name", "recipe", "state")
_LABEL_WIDTH = 12
_OF_RANKS = ("busy", "data", "garbage", "checkpoint")


def summary_of(history: History) -> dict[str, Any]:
    """One run in a few figures; units in `docs/telemetry.md`."""
    start = history.start or {}
    return {
        "name": history.folder.absolute().name,
        "folder": str(history.folder),
        "recipe": start.get("recipe"),
        "state": history.state(),
        "step": history.last_step,
        "total_steps": history.total_steps,
        "loss": history.loss,
        "best_bits_per_byte": history.best_bits_per_byte,
        "tokens_total": history.tokens_total,
        "last_time": history.last_time,
    }


def details_of(history: History) -> dict[str, Any]:
    """One run in full."""
    seconds = history.seconds_by_phase()
    total = sum(seconds.values())
    return summary_of(history) | {
        "start": history.start,
        "starts": history.starts,
        "stop": history.stop,
        "losses": [[step, history.steps[step]["loss"]] for step in sorted(history.steps)],
        "validations": history.validations,
        "evaluations": history.evaluations,
        "seconds": seconds,
        "shares": {name: value / total for name, value in seconds.items()} if total else {},
        "ranks": history.ranks,
        "checkpoints": history.kept_checkpoints(),
        "warnings": history.warnings,
    }


def run_table(summaries: Sequence[Mapping[str, Any]], now: float | None = None) -> str:
    """The runs as a table, one line each."""
    if not summaries:
        return "no runs yet: armillary train"
    now = time.time() if now is None else now
    rows = [_COLUMNS, *(_row(summary, now) for summary in summaries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = []
    for row in rows:
        cells = zip(row, widths, _COLUMNS, strict=True)
        lines.append(
            "  ".join(
                text.ljust(width) if name in _LEFT else text.rjust(width)
                for text, width, name in cells
            ).rstrip()
        )
    return "\n".join(lines)


def _row(summary: Mapping[str, Any], now: float) -> tuple[str, ...]:
    total = summary["total_steps"]
    last = summary["last_time"]
    return (
        printable(summary["name"]),
        summary["recipe"] or UNKNOWN,
        f"{summary['step']}" if total is None else f"{summary['step']}/{total}",
        number(summary["loss"], ".4f"),
        number(summary["best_bits_per_byte"], ".4f"),
        quantity(summary["tokens_total"]),
        summary["state"],
        UNKNOWN if last is None else duration(max(0.0, now - last)),
    )


def run_page(history: History, now: float | None = None) -> str:
    """One run as a page of text."""
    now = time.time() if now is None else now
    lines = [*_overview(history, now), *_learning(history), *_speed(history)]
    lines += [*_time_shares(history), *_ranks(history)]
    lines += [*_checkpoints(history), *_warnings(history)]
    return "\n".join(lines)


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL_WIDTH}}{text}".rstrip()


def _overview(history: History, now: float) -> list[str]:
    summary, start = summary_of(history), history.start or {}
    total = summary["total_steps"]
    state = history.state()
    if history.stop is not None:
        state += f": {history.stop['reason']} (exit code {history.stop['exit_code']})"
    elif state == "stopped":
        state += ": its process is gone and said nothing (killed, or the machine went down)"
    lines = [
        _line("run", str(history.folder)),
        _line("recipe", summary["recipe"] or UNKNOWN),
        _line("state", state),
        _line("steps", f"{summary['step']}" + ("" if total is None else f" of {total}")),
        _line("tokens", quantity(summary["tokens_total"])),
        _line("parameters", quantity(start.get("parameters"))),
    ]
    if history.starts > 1:
        lines.append(_line("started", f"{history.starts} times"))
    if history.last_time is not None:
        lines.append(_line("last sign", f"{duration(max(0.0, now - history.last_time))} ago"))
    return lines


def _learning(history: History) -> list[str]:
    curve = history.losses()
    lines = []
    if curve:
        lines.append(_line("loss", f"{curve[0]:.4f} -> {curve[-1]:.4f}"))
        lines.append(_line("", sparkline(curve, _CURVE_WIDTH)))
    best = f", best {number(history.best_bits_per_byte, '.4f')}"
    for name, event in history.last_validations().items():
        bits = number(event["bits_per_byte"], ".4f")
        lines.append(_line("held out", f"{name} {bits} bits/byte{best}"))
        best = ""
    for task, metrics in history.last_evaluations().items():
        figures = [f"{name} {number(event['value'], '.4f')}" for name, event in metrics.items()]
        step = max(event["step"] for event in metrics.values())
        words = f"{printable(task)} at step {step}: {', '.join(map(printable, figures))}"
        lines.append(_line("evaluated", words))
    return lines


def _speed(history: History) -> list[str]:
    if not history.steps:
        return []
    recent = [history.steps[step] for step in sorted(history.steps)[-20:]]
    known = (event["tokens_per_second"] for event in recent)
    rates = sorted(rate for rate in known if rate is not None)
    last = recent[-1]
    rate = number(rates[len(rates) // 2] if rates else None, ",.0f")
    text = f"{rate} tokens/s, mfu {percent(last['mfu'])}"
    memory = byte_count(last["memory_peak_bytes"])
    return [
        _line("speed", f"{text}, {memory} peak memory (median of the last {len(recent)} steps)")
    ]


def _time_shares(history: History) -> list[str]:
    seconds = history.seconds_by_phase()
    total = sum(seconds.values())
    if not total:
        return []
    shares = (
        f"{name.replace('_', '-')} {percent(value / total)}" for name, value in seconds.items()
    )
    return [_line("time", f"{duration(total)} in steps: {', '.join(shares)}")]


def _ranks(history: History) -> list[str]:
    """Who the others wait for, by the newest report."""
    event = history.ranks
    if event is None:
        return []
    parts = []
    for name in _OF_RANKS:
        spread = event.get(f"{name}_seconds")
        if isinstance(spread, Mapping) and all(
            isinstance(spread.get(key), int | float) for key in ("median", "max", "rank")
        ):
            of = f"{spread['median']:.3g} s (rank {spread['rank']}: {spread['max']:.3g} s)"
            parts.append(f"{name} {of}")
    host = f" ({printable(event['slowest_host'])})" if event.get("slowest_host") else ""
    ratio = number(event["slowest_over_median"], ".2f")
    slowest = f"slowest is rank {event['slowest']}{host}, {ratio} times the median"
    lines = [_line("ranks", f"{slowest} over {event['steps']} steps to step {event['step']}")]
    return [*lines, _line("", f"median of a step: {', '.join(parts)}")] if parts else lines


def _checkpoints(history: History) -> list[str]:
    lines: list[str] = []
    for event in history.kept_checkpoints():
        label = "" if lines else "checkpoints"
        lines.append(_line(label, f"{Path(event['path']).name}  {byte_count(event['bytes'])}"))
    return lines


def _warnings(history: History) -> list[str]:
    lines: list[str] = []
    for event in history.warnings[-_MOST_WARNINGS:]:
        label = "" if lines else "warnings"
        hint = f" ({event['hint']})" if event["hint"] else ""
        message = printable(f"{event['kind']} at step {event['step']}: {event['message']}{hint}")
        lines.append(_line(label, message))
    hidden = len(history.warnings) - len(lines)
    if hidden > 0:
        lines.append(_line("", f"and {hidden} before these"))
    return lines
