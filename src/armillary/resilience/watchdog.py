"""Ends a run that stands still, and says who holds it up. Loads no torch.

A collective waits for the slowest rank, and for ever for one that never comes; a rank in it cannot
say so, nor be woken. So a thread of its own on every rank looks whether the rank gets anything done
(`foundation.progress.mark`). When one has not for too long, all ranks write down where they are and
tell each other. The run stands still when no rank gets anything done: as long as one does, the
others may well be waiting for it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, TypeVar

from armillary.foundation.errors import EXIT_FAILED, RunError
from armillary.foundation.progress import Mark, marks
from armillary.resilience.roll_call import RollCall
from armillary.resilience.watchdog_conference import Conference
from armillary.resilience.watchdog_config import Watchdog
from armillary.resilience.watchdog_stacks import (
    all_stacks,
    is_debugged,
    native_frames,
    place_of,
    threads_waited_for,
)
from armillary.resilience.watchdog_verdict import Answer, judge

T = TypeVar("T")

HANG_FOLDER = "hang"
"""In a run folder: where ranks were when the run stood still."""

_TICK_SECONDS = 0.2
_LATE_IN_A_ROW = 3
_STOPPING_SECONDS = 5.0
_TRAINING = "training"
"""What the main thread does; other work has the name of its thread."""
_NOT_IN_IT = "nothing: it is done with this, or has not begun"
_NATIVE = "-native.txt"


@dataclass(frozen=True, slots=True)
class Recorder:
    """What is known of the collectives that this process has begun."""

    counts: Callable[[], Mapping[str, int]] = dict
    """By process group, how many."""
    unfinished: Callable[[], Sequence[str]] = list
    """Those that have not ended, in words."""
    dump: Callable[[], bytes] = bytes
    """All that is known of the newest; empty: nothing."""


class Watch:
    """Looks on while it is entered.

    Args:
        config: the recipe's part.
        folder: the run folder.
        roll_call: where this rank is among the others; entered.
        recorder: of collectives.
        leave: how the process ends; for tests.
    """

    def __init__(
        self,
        config: Watchdog,
        *,
        folder: Path,
        roll_call: RollCall,
        recorder: Recorder | None = None,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self.step = 0
        """Optimizer steps finished."""
        self.stepping = False
        """Whether the first step is done and the last is not, so that the shorter limit holds."""
        self.waiting_seconds = 0.0
        """How long the main thread was seen waiting for other ranks in collectives."""
        self.tell: Callable[[RunError, bool], None] = lambda error, speaks: None
        """Called from a thread of the watch before the process ends; whether this rank is the one
        that writes the end into the log."""
        self._config, self._roll_call = config, roll_call
        self._folder = folder / HANG_FOLDER
        self._recorder = recorder or Recorder()
        self._leave = leave
        self._main = threading.get_ident()
        self._quiet: dict[int, tuple[int, float]] = {}  # by thread: its count, and since when
        self._not_before = 0.0
        self._late_in_a_row = 0
        self._conferences = 0
        self._native: TextIO | None = None
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watch:
        if self._config.enabled:
            self._open_backstop()
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leaving.set()
        if self._thread.is_alive():
            self._thread.join(self._config.grace_seconds)
        if self._config.enabled:
            self._close_backstop()

    @property
    def limit(self) -> float:
        """Seconds without progress that are too many now."""
        config = self._config
        return config.step_seconds if self.stepping else config.first_step_seconds

    @property
    def _patience(self) -> float:
        """The same for ranks that wait for others that do not answer: who asked a run to stop does
        not give it long (torchrun 30 seconds)."""
        stopping = self._roll_call.stop_posted is not None
        return min(self.limit, _STOPPING_SECONDS) if stopping else self.limit

    # What this thread does all the time.

    def _watch(self) -> None:
        before = time.monotonic()
        tick = min(_TICK_SECONDS, self._config.step_seconds / 5)
        while not self._leaving.wait(tick):
            now = time.monotonic()
            # Only the time in which this thread was awake counts: the process may have been
            # stopped and gone on, with everything in it.
            elapsed = min(now - before, 5 * tick)
            before = now
            self._arm_backstop()
            self._grow_quiet(elapsed)
            self._not_before -= elapsed
            if self.stepping and (place := place_of(self._main)) and place.waits_in:
                self.waiting_seconds += elapsed
            if (about := self._called() or self._late()) is not None:
                self._confer(about)
                before = time.monotonic()

    def _grow_quiet(self, elapsed: float) -> None:
        there = {self._main: Mark(), **marks()}
        for thread, mark in there.items():
            count, seconds = self._quiet.get(thread, (-1, 0.0))
            same = count == mark.count
            self._quiet[thread] = (mark.count, seconds + elapsed if same else 0.0)
        for thread in self._quiet.keys() - there.keys():
            del self._quiet[thread]

    def _quiet_seconds(self, thread: int) -> float:
        """How long a thread, and those of this process that it waits for, got nothing done."""
        if is_debugged(thread):
            return 0.0
        others = threads_waited_for(thread)
        if thread == self._main:  # whoever has no work of its own may well do that of the main one
            others += [other for other, mark in marks().items() if not mark.watched]
        return min(self._quiet[each][1] for each in (thread, *others) if each in self._quiet)

    def _late(self) -> str | None:
        """The work that is late here; None: none is, or it was told a short while ago."""
        late = None
        if self._not_before <= 0:
            late = next((a for thread, a in self._watched().items() if self._is_late(thread)), None)
        # One look may find a thread between two waits for the one that it waits for.
        self._late_in_a_row = self._late_in_a_row + 1 if late is not None else 0
        return late if self._late_in_a_row >= _LATE_IN_A_ROW else None

    def _is_late(self, thread: int) -> bool:
        own = self._quiet[thread][1]  # as a rule enough of an answer, and cheaper
        return own > self._patience and self._quiet_seconds(thread) > self._patience

    def _watched(self) -> dict[int, str]:
        """The threads whose work must go on, with its name; the main one, which waits, last."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        others = {
            thread: names[thread]
            for thread, mark in marks().items()
            if mark.watched and thread in names and thread in self._quiet
        }
        return {**others, self._main: _TRAINING}

    def _called(self) -> str | None:
        """What another rank asks about in a conference that is new to this one."""
        number, _, about = (self._roll_call.call or "").partition(" ")
        if not about or int(number) < self._conferences:
            return None
        self._conferences = int(number)
        return about

    # What it does when a rank is late.

    def _confer(self, about: str) -> None:
        grace, alone = self._config.grace_seconds, self._roll_call.store is None
        answer, stacks = self._answer(about), all_stacks()
        _within(grace, lambda: self._write_down(answer, "none yet", stacks))
        conference = self._conference()
        told = None if alone else _within(conference.seconds, lambda: conference.hold(answer))
        self._conferences += 1
        if told is None:  # one rank; or the store went with rank 0, so that the next one speaks
            verdict = judge(
                [answer], self._roll_call.world_size, self.limit, silent_limit=self._patience
            )
            verdict = replace(verdict, speaker=0 if alone else 1)
        else:
            verdict = told
        if not verdict.hung:
            self._not_before = max(1.0, self.limit - verdict.quiet_seconds)
            _within(grace, self._forget)
            return
        if self._leaving.is_set():
            return  # the main thread has got out by itself, and says why
        _within(grace, lambda: self._write_down(answer, verdict.message, stacks))
        error = RunError(verdict.problem(str(self._folder)))
        speaks = verdict.speaker == self._roll_call.rank
        _within(grace, lambda: self.tell(error, speaks))
        if told is not None:
            _within(conference.seconds, conference.agree_to_leave)
        self._close_backstop()
        self._leave(EXIT_FAILED)

    def _conference(self) -> Conference:
        return Conference(
            self._roll_call,
            self._conferences,
            grace=self._config.grace_seconds,
            limit=self.limit,
            silent_limit=self._patience,
            stuck_at=self._native_frames,
        )

    def _answer(self, about: str) -> Answer:
        thread = next((each for each, name in self._watched().items() if name == about), None)
        place = None if thread is None else place_of(thread)
        own: dict[str, Any] = {
            "about": about,
            "rank": self._roll_call.rank,
            "host": socket.gethostname(),
            "step": self.step,
            "collectives": dict(_within(self._config.grace_seconds, self._recorder.counts) or {}),
        }
        if thread is None or place is None:
            return Answer(**own, quiet_seconds=math.inf, waits_in=_NOT_IN_IT)
        return Answer(
            **own,
            quiet_seconds=self._quiet_seconds(thread),
            doing=marks().get(thread, Mark()).doing,
            frames=place.frames,
            waits_in=place.waits_in,
            opaque=place.opaque,
        )

    def _write_down(self, answer: Answer, verdict: str, stacks: str) -> None:
        """Leaves in the run folder where this rank is."""
        lines = [
            f"rank {answer.rank} on {answer.host}, process {os.getpid()},"
            f" {datetime.now(UTC).isoformat(timespec='seconds')}",
            f"steps finished: {answer.step}; doing: {answer.doing or 'nothing that was told'},"
            f" with nothing done for {answer.quiet_seconds:.1f} s",
            f"waits for other ranks in: {answer.waits_in or 'no collective'}",
            f"at: {' < '.join(answer.frames)}",
            f"collectives begun, by group: {dict(answer.collectives) or 'not counted'}",
            f"of these not ended: {'; '.join(self._recorder.unfinished()) or 'none'}",
            f"verdict: {verdict}",
            "",
            stacks,
        ]
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path().write_text("\n".join(lines), encoding="utf-8", errors="replace")
        if known := self._recorder.dump():
            self._path("-collectives.json").write_bytes(known)

    def _forget(self) -> None:
        """It was no standstill."""
        self._path().unlink(missing_ok=True)
        self._path("-collectives.json").unlink(missing_ok=True)

    def _path(self, ending: str = ".txt", rank: int | None = None) -> Path:
        own = self._roll_call.rank if rank is None else rank
        return self._folder / f"rank-{own:05}{ending}"

    # When native code holds the interpreter, no Python thread runs. A thread of the C library does.

    def _open_backstop(self) -> None:
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._native = self._path(_NATIVE).open("w", encoding="utf-8")

    def _arm_backstop(self) -> None:
        file = self._native or sys.__stderr__
        if file is not None:
            faulthandler.dump_traceback_later(self.limit + _TICK_SECONDS, file=file)

    def _close_backstop(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._native is not None:
            self._native.close()
        with contextlib.suppress(OSError):
            self._path(_NATIVE).unlink(missing_ok=True)
            self._folder.rmdir()  # unless something is in it

    def _native_frames(self, rank: int) -> str:
        """Where a rank was that runs no Python thread any more, if it left that in this folder."""
        try:
            text = self._path(_NATIVE, rank).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return native_frames(text)


def _within(seconds: float, work: Callable[[], T]) -> T | None:
    """The result of work that may block for ever or fail; None where it did."""
    results: list[T] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            results.append(work())

    thread = threading.Thread(target=run, name="watchdog-work", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
