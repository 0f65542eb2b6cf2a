"""What a run folder's events say about the run, for people who come later. Imports no torch."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from armillary.foundation.errors import EXIT_FINISHED, EXIT_RUN_ME_AGAIN
from armillary.foundation.run_folder import EVENTS_FILE
from armillary.telemetry.events import read_events
from armillary.telemetry.schema import COMMON, REQUIRED

_PHASES = ("data", "forward_backward", "optimizer", "checkpoint", "other")
_CLOCK_SLACK_SECONDS = 60.0
_FINAL = "final-"

_TEXT = (str,)
_WHOLE = (int,)
_NUMBER = (int, float)
_MAYBE = (int, float, type(None))
_READ: dict[str, dict[str, tuple[type, ...]]] = {
    "start": {
        "recipe": (str, type(None)),
        "resumed_from": (int, type(None)),
        "total_steps": (int, type(None)),
        "parameters": _MAYBE,
    },
    "step": {
        **dict.fromkeys(("loss", "tokens_total", "tokens_per_second"), _MAYBE),
        **dict.fromkeys(("mfu", "memory_peak_bytes"), _MAYBE),
        **dict.fromkeys((f"{phase}_seconds" for phase in _PHASES), _MAYBE),
    },
    "validation": {"name": _TEXT, "bits_per_byte": _MAYBE},
    "evaluation": {"task": _TEXT, "metric": _TEXT, "value": _MAYBE, "items": _WHOLE},
    "checkpoint": {"state": _TEXT, "path": _TEXT, "bytes": _MAYBE},
    "warning": {"message": _TEXT, "hint": _TEXT},
    "error": {"message": _TEXT, "hint": _TEXT},
    "stop": {"reason": _TEXT, "exit_code": _WHOLE},
    "rewind": {"to_step": _WHOLE},
    "stage": {"index": _WHOLE, "first_step": _WHOLE, "last_step": _WHOLE},
    "ranks": {
        "steps": _WHOLE,
        "slowest": _WHOLE,
        "slowest_host": (str, type(None)),
        "slowest_over_median": _MAYBE,
    },
}
"""What is read of each kind of event, and what it may be."""


@dataclass(slots=True)
class History:
    """One run as its events tell it. Repeated steps, after a resume, count once: the later wins."""

    folder: Path
    start: dict[str, Any] | None = None
    """The latest `start` event."""
    starts: int = 0
    """How often the run was started."""
    stop: dict[str, Any] | None = None
    """The `stop` event after the latest start."""
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    validations: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    stages: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The latest `stage` event of each stage, by its number; empty: the run is all alike."""
    checkpoints: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Latest `checkpoint` event by name: a run may be moved, or be called by another path."""
    resumable: tuple[int, str] = (0, "")
    """Step and path of what the run would go on from, by its latest start and what was saved since;
    0 and "" where that is nothing."""
    warnings: list[dict[str, Any]] = field(default_factory=list)
    """`warning` and `error` events."""
    ranks: dict[str, Any] | None = None
    """The latest `ranks` event."""
    last_time: float | None = None
    unreadable: bool = False
    """Whether the events could not be read."""

    def take(self, event: Mapping[str, Any]) -> None:
        """Adds one event.

        Raises:
            ValueError: it is not an event of a run.
        """
        _check(event)
        kept = dict(event)
        kind = kept["kind"]
        self.last_time = kept["time"]
        if kind == "start":
            self.start, self.stop = kept, None
            self.starts += 1
            step = kept["resumed_from"] or 0
            paths = (old["path"] for old in self.checkpoints.values() if old["step"] == step)
            self.resumable = step, next(paths, "") if step else ""
            self._forget_after(step)
        elif kind == "step":
            self.steps[kept["step"]] = kept
        elif kind == "validation":
            self.validations.append(kept)
        elif kind == "evaluation":
            self.evaluations.append(kept)
        elif kind == "stage":
            self.stages[kept["index"]] = kept
        elif kind == "checkpoint":
            self.checkpoints[PurePosixPath(kept["path"]).name] = kept
            if kept["state"] == "durable":
                self.resumable = kept["step"], kept["path"]
        elif kind in ("warning", "error"):
            self.warnings.append(kept)
        elif kind == "ranks":
            self.ranks = kept
        elif kind == "rewind":
            self._forget_after(kept["to_step"])
        elif kind == "stop":
            self.stop = kept

    def _forget_after(self, step: int) -> None:
        """What came after is repeated, or never was."""
        self.steps = {number: old for number, old in self.steps.items() if number <= step}
        self.validations = [old for old in self.validations if old["step"] <= step]
        self.evaluations = [old for old in self.evaluations if old["step"] <= step]

    @property
    def last_step(self) -> int:
        """The last optimizer step that is part of the run; 0 before the first."""
        return max(self.steps, default=(self.start or {}).get("resumed_from") or 0)

    @property
    def total_steps(self) -> int | None:
        """Steps that the run is to have."""
        return (self.start or {}).get("total_steps")

    @property
    def loss(self) -> float | None:
        """Loss of the last step."""
        return self.steps[max(self.steps)]["loss"] if self.steps else None

    @property
    def tokens_total(self) -> int | None:
        """Valid tokens trained on so far."""
        return self.steps[max(self.steps)]["tokens_total"] if self.steps else None

    @property
    def best_bits_per_byte(self) -> float | None:
        """Lowest validation bits per byte of one set.

        That is the set that was measured first; all of its text, if that was scored, and not the
        part that is looked at on the way.
        """
        names = [event["name"] for event in self.validations]
        whole = (name for name in names if name.startswith(_FINAL))
        name = next(whole, names[0] if names else None)
        found = (event["bits_per_byte"] for event in self.validations if event["name"] == name)
        return min((bits for bits in found if bits is not None), default=None)

    def last_validations(self) -> dict[str, dict[str, Any]]:
        """The latest `validation` event of each set, by name."""
        return {event["name"]: event for event in self.validations}

    def last_evaluations(self) -> dict[str, dict[str, dict[str, Any]]]:
        """The latest `evaluation` event of each metric, by name, of each task, by name."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for event in self.evaluations:
            found.setdefault(event["task"], {})[event["metric"]] = event
        return found

    def losses(self) -> list[float]:
        """The loss curve in order of steps; steps without a finite loss are left out."""
        curve = (self.steps[step]["loss"] for step in sorted(self.steps))
        return [loss for loss in curve if loss is not None]

    def state(self) -> str:
        """unreadable, empty, running, finished, stopped or failed.

        A run that has not said how it ended is running while its process lives; on another host
        that cannot be seen, and it counts as running. One whose process is gone was stopped.
        """
        if self.start is None:
            return "unreadable" if self.unreadable else "empty"
        if self.stop is None:
            return "running" if _is_alive(self.start) else "stopped"
        if self.stop["exit_code"] == EXIT_FINISHED:
            return "finished"
        return "stopped" if self.stop["exit_code"] == EXIT_RUN_ME_AGAIN else "failed"

    def seconds_by_phase(self) -> dict[str, float]:
        """Seconds of all steps by phase, those phases that were recorded."""
        totals = {}
        for phase in _PHASES:
            found = [event.get(f"{phase}_seconds") for event in self.steps.values()]
            known = [seconds for seconds in found if seconds is not None]
            if known:
                totals[phase] = sum(known)
        return totals

    def kept_checkpoints(self) -> list[dict[str, Any]]:
        """Checkpoints that were published and not removed since, by step."""
        durable = [event for event in self.checkpoints.values() if event["state"] == "durable"]
        return sorted(durable, key=lambda event: event["step"])


def read_history(folder: Path) -> History:
    """Reads RUN/events.jsonl.

    Raises:
        RunError: a line is broken.
        ValueError: it is not an event of a run.
        OSError: the file cannot be read.
    """
    return history_of(folder, read_events(folder / EVENTS_FILE))


def history_of(folder: Path, events: Iterable[Mapping[str, Any]]) -> History:
    """The history that these events tell."""
    history = History(folder)
    for event in events:
        history.take(event)
    return history


def is_run_folder(folder: Path) -> bool:
    """Whether a folder holds a run: its events."""
    return (folder / EVENTS_FILE).is_file()


def _check(event: Mapping[str, Any]) -> None:
    kind = event.get("kind")
    if not isinstance(kind, str):
        raise ValueError(f"an event's kind is {kind!r}")
    required = (*COMMON, *REQUIRED.get(kind, ()))
    for name, allowed in {"time": _NUMBER, "step": _WHOLE, **_READ.get(kind, {})}.items():
        if name in required and name not in event:
            raise ValueError(f"a {kind} event without {name}")
        value = event.get(name)
        if not isinstance(value, allowed) or _is_wild(value):
            raise ValueError(f"a {kind} event with {name} {value!r}"[:200])


def _is_wild(value: object) -> bool:
    """Whether a number is none, or one that nothing can be counted with."""
    if isinstance(value, float):
        return not math.isfinite(value)
    return isinstance(value, int) and abs(value) >= 2**63


def _is_alive(start: Mapping[str, Any]) -> bool:
    host, pid = start.get("host"), start.get("pid")
    if host != socket.gethostname() or not isinstance(pid, int):
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    try:
        born = Path(f"/proc/{pid}").stat().st_ctime
    except OSError:
        return True
    return bool(born <= start["time"] + _CLOCK_SLACK_SECONDS)
