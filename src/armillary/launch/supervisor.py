"""Starts the ranks of this machine again after a failure. Loads no torch.

What a failed attempt has left is read from the event log of the run: how far it came, what it said,
and whether a checkpoint became durable, which is the only progress that a restart keeps.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from armillary.foundation.errors import (
    EXIT_BAD_INPUT,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_RUN_ME_AGAIN,
)
from armillary.foundation.restarts import RESTART_VARIABLE
from armillary.foundation.run_folder import EVENTS_FILE
from armillary.launch.forwarding import Forwarding
from armillary.launch.local import PROGRAM, Ended, run_once
from armillary.launch.place import Place

_FINAL = (EXIT_FINISHED, EXIT_BAD_INPUT, EXIT_RUN_ME_AGAIN, EXIT_INTERRUPTED)
"""Exit codes after which starting again would be of no use, or against somebody's will."""
_LONGEST_PAUSE_SECONDS = 60.0
_POLL_SECONDS = 0.05
_SAME_FAILURES = 3
"""Failures at one step, in the same words and without progress, that make a crash loop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """What the event log says of one start of a run."""

    began: bool = False
    """Whether it came as far as its `start` event."""
    step: int = 0
    """Optimizer steps finished when it ended."""
    error: str = ""
    """Of its `error` event; empty if it was killed."""
    saved: bool = False
    """Whether it made a checkpoint durable."""


def supervise(
    argv: Sequence[str],
    nproc: int,
    folder: Path,
    *,
    max_restarts: int,
    place: Place | None = None,
    program: Sequence[str] = PROGRAM,
    grace_seconds: float = 30.0,
    pause_seconds: float = 1.0,
) -> int:
    """`launch`, again and again until the run ends otherwise than by a failure.

    Each start goes on from the newest checkpoint that verifies, as the same command always does.
    Finished, refused, stopped or interrupted runs are not started again, nor those that somebody
    sent a signal. The number of the restart is in the `start` event.

    Args:
        folder: The run folder.
        max_restarts: Failures in a row after which the run is started again. A checkpoint that
            became durable in between begins a new row.
        pause_seconds: Before the first restart of a row; doubled before each further one, up to a
            minute.

    Returns:
        The exit code of the last start; 75 if a stop was asked for during a pause.

    Raises:
        UserError: fewer than one rank.
    """
    log = folder / EVENTS_FILE
    row: list[tuple[int, str]] = []  # step and words of each failure since the last progress
    number = 0
    with Forwarding() as signals:
        while True:
            before = end_of_lines(log)
            known = {RESTART_VARIABLE: str(number)}
            ended = run_once(
                argv,
                nproc,
                signals=signals,
                place=place,
                program=program,
                grace_seconds=grace_seconds,
                environment=known,
            )
            if ended.exit_code in _FINAL or ended.asked:
                return ended.exit_code
            attempt = read_attempt(log, before)
            if attempt.saved:
                row.clear()
            row.append((attempt.step, attempt.error or ended.reason))
            if reason := _hopeless(row, attempt, max_restarts):
                print(f"error: {reason}", file=sys.stderr)
                return ended.exit_code
            number += 1
            seconds = min(pause_seconds * 2 ** (len(row) - 1), _LONGEST_PAUSE_SECONDS)
            print(_announcement(ended, attempt, len(row), max_restarts, seconds), file=sys.stderr)
            if _stopped_within(seconds, signals):
                return EXIT_RUN_ME_AGAIN


def end_of_lines(log: Path) -> int:
    """Bytes of a log up to its last whole line: one torn by a kill is cut by the next start."""
    try:
        with log.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as text:
            return text.rfind(b"\n") + 1
    except (OSError, ValueError):  # there is none, or it is empty
        return 0


def read_attempt(log: Path, offset: int) -> Attempt:
    """What was written to an event log from byte `offset` on."""
    began, step, error, saved = False, 0, "", False
    for event in _events(log, offset):
        kind = event.get("kind")
        if kind == "start":
            began, step = True, _step_of(event)
        elif kind == "step":
            step = _step_of(event)
        elif kind == "error":
            error = str(event.get("message") or "")
        elif kind == "checkpoint":
            saved = saved or event.get("state") == "durable"
    return Attempt(began=began, step=step, error=error, saved=saved)


def _step_of(event: dict[str, Any]) -> int:
    step = event.get("step")
    return step if isinstance(step, int) else 0


def _events(log: Path, offset: int) -> list[dict[str, Any]]:
    """The events of the lines after `offset`; one that is torn at the end is left out."""
    found = []
    try:
        with log.open("rb") as file:
            file.seek(offset)
            lines = file.read().splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            found.append(event)
    return found


def _hopeless(row: list[tuple[int, str]], attempt: Attempt, max_restarts: int) -> str:
    """Why the run is not started again; empty if it is."""
    step, words = row[-1]
    alike = 0
    for failure in reversed(row):
        if failure != row[-1]:
            break
        alike += 1
    where = f"after step {step}" if attempt.began else "before its first step"
    if alike >= _SAME_FAILURES and attempt.began:
        return f"the run failed {alike} times in a row {where}, each time alike: {words}"
    if len(row) > max_restarts:
        times = "once" if len(row) == 1 else f"{len(row)} times in a row"
        return f"the run failed {times} without a new checkpoint, at last {where}: {words}"
    return ""


def _announcement(
    ended: Ended, attempt: Attempt, failures: int, max_restarts: int, seconds: float
) -> str:
    where = f"after step {attempt.step}" if attempt.began else "before its first step"
    return (
        f"{ended.reason.partition(': ')[0]} {where}; restart {failures} of {max_restarts}"
        f" from the newest checkpoint, in {seconds:g} s"
    )


def _stopped_within(seconds: float, signals: Forwarding) -> bool:
    """Waits; whether somebody asked to stop meanwhile."""
    until = time.monotonic() + seconds
    while not signals.came and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    return signals.came
