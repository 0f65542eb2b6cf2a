"""Plain lines: one record an event, no colours, no control characters."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from armillary.foundation.progress import Advance, mark
from armillary.telemetry.console.state import RunState
from armillary.telemetry.format import byte_count, count_of, duration, number, percent, quantity
from armillary.telemetry.text import printable

_FIRST_LINE_AFTER = 2.0
_LINE_EVERY = 10.0


def step_line(state: RunState) -> str:
    """`step 20/200  loss 3.412  grad 0.93  ...` of the latest step."""
    values = state.values
    total = "" if state.total_steps is None else f"/{state.total_steps}"
    parts = [
        f"step {state.step}{total}",
        f"loss {number(values['loss'], '.4f')}",
        f"grad {number(values['gradient_norm'], '.3g')}",
        f"lr {number(values['learning_rate'], '.1e')}",
        f"{number(values['tokens_per_second'], ',.0f')} tok/s",
        f"mfu {percent(values['mfu'])}",
        f"mem {byte_count(values['memory_peak_bytes'])}",
        f"data {percent(state.data_share())}",
    ]
    left = state.seconds_left()
    if left is not None:
        parts.append(f"eta {duration(left)}")
    return "  ".join(parts)


def event_line(event: Mapping[str, Any], state: RunState) -> str | None:
    """The record of an event that `state` has taken, or None when it is not worth a line."""
    form = _FORMS.get(event["kind"])
    return None if form is None else form(event, state)


def _validation_line(event: Mapping[str, Any], state: RunState) -> str:
    return (
        f"{event['name']} at step {event['step']}  loss {number(event['loss'], '.4f')}  "
        f"bits/byte {number(event['bits_per_byte'], '.4f')}"
    )


def _evaluation_line(event: Mapping[str, Any], state: RunState) -> str:
    value, error = number(event["value"], ".4f"), event.get("error")
    spread = "" if error is None else f" +- {number(error, '.4f')}"
    return f"{event['task']} at step {event['step']}  {event['metric']} {value}{spread}"


def _checkpoint_line(event: Mapping[str, Any], state: RunState) -> str | None:
    if event["state"] not in ("durable", "failed"):
        return None
    size = f"  {byte_count(event['bytes'])}" if event["bytes"] else ""
    took = f"  in {duration(event['seconds'])}" if event["seconds"] is not None else ""
    return f"checkpoint of step {event['step']} {event['state']}{size}{took}"


def _warning_line(event: Mapping[str, Any], state: RunState) -> str:
    hint = f" ({event['hint']})" if event["hint"] else ""
    return f"warning: {event['message']}{hint}"


def _start_line(event: Mapping[str, Any], state: RunState) -> str:
    parts = [f"training {state.recipe}".rstrip(), f"{quantity(state.parameters)} parameters"]
    parts.append(count_of(state.world_size, "rank"))
    if state.total_steps is not None:
        parts.append(count_of(state.total_steps, "step"))
    if state.resumed_from is not None:
        parts.append(f"resumed from step {state.resumed_from}")
    return ", ".join(parts)


def _stage_line(event: Mapping[str, Any], state: RunState) -> str:
    steps = f"stage {event['name']}: steps {event['first_step']} to {event['last_step']}"
    return ", ".join([steps, *event["set"]])


# No `error`: the command that fails tells why, with a console or without.
_FORMS: dict[str, Callable[[Mapping[str, Any], RunState], str | None]] = {
    "start": _start_line,
    "step": lambda event, state: step_line(state),
    "validation": _validation_line,
    "evaluation": _evaluation_line,
    "checkpoint": _checkpoint_line,
    "warning": _warning_line,
    "message": lambda event, state: str(event["message"]),
    "rewind": lambda event, state: f"warning: {event['message']}",
    "stage": _stage_line,
    "sample": lambda event, state: f"sample: {event['prompt']}{event['text']}",
    "profile": lambda event, state: (
        f"profile of steps {event['first_step']} to {event['last_step']}: {event['path']}"
    ),
    "stop": lambda event, state: f"stop: {event['reason']} (exit code {event['exit_code']})",
}


class PlainConsole:
    """Sink and progress in plain lines, for logs, pipes and CI."""

    def __init__(
        self,
        stream: TextIO,
        log_every: int = 1,
        *,
        clock: Callable[[], float] = time.monotonic,
        background: bool = True,
    ) -> None:
        """
        Args:
            stream: Where lines go.
            log_every: Steps between two step records; the first and the last always have one.
            clock: Seconds, for progress.
            background: Whether work that reports nothing still gets its lines, from a thread.
        """
        self._stream = stream
        self._log_every = log_every
        self._clock = clock
        self._background = background
        self._state = RunState()
        self._first_step: int | None = None
        self._lock = threading.Lock()

    def on_event(self, event: Mapping[str, Any]) -> None:
        """See `Sink.on_event`."""
        self._state.take(event)
        if event["kind"] == "step" and not self._wants(event["step"]):
            return
        line = event_line(event, self._state)
        if line is not None:
            self._print(line)

    def close(self) -> None:
        """See `Sink.close`."""
        self._stream.flush()

    @contextmanager
    def task(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Advance]:
        """See `Progress.task`: a line after 2 s, every 10 s, and at the end if any was printed."""
        mark(label)
        task = _PlainTask(self._print, self._clock, label, total, unit)
        ended = threading.Event()
        if self._background:
            threading.Thread(target=_tick_until, args=(task, ended), daemon=True).start()
        try:
            yield task.advance
        except BaseException:
            ended.set()
            raise
        ended.set()
        task.finish()

    def _wants(self, step: int) -> bool:
        if self._first_step is None:
            self._first_step = step
        ends = (self._first_step, self._state.total_steps)
        return step in ends or step % self._log_every == 0

    def _print(self, line: str) -> None:
        with self._lock:
            self._stream.write(printable(line) + "\n")
            self._stream.flush()


class _PlainTask:
    def __init__(
        self,
        show: Callable[[str], None],
        clock: Callable[[], float],
        label: str,
        total: float | None,
        unit: str,
    ) -> None:
        self._show, self._clock = show, clock
        self._label, self._total, self._unit = label, total, unit
        self._done = 0.0
        self._begun = clock()
        self._next_line = self._begun + _FIRST_LINE_AFTER
        self._spoken = False
        self._lock = threading.Lock()

    def advance(self, amount: float) -> None:
        mark()
        with self._lock:
            self._done += amount
        self.tick()

    def tick(self) -> None:
        """Prints a line if one is due."""
        now = self._clock()
        with self._lock:
            if now < self._next_line:
                return
            self._next_line = now + _LINE_EVERY
            self._spoken = True
            line = f"{self._label}: {self._amount()}{duration(now - self._begun)}"
        self._show(line)

    def finish(self) -> None:
        took = self._clock() - self._begun
        if self._spoken or took >= _FIRST_LINE_AFTER:
            self._show(f"{self._label}: done in {duration(took)}")

    def _amount(self) -> str:
        if self._total:
            share = min(1.0, self._done / self._total)
            of = f" of {quantity(self._total)} {self._unit}".rstrip()
            return f"{share:.0%}{of}, "
        return f"{quantity(self._done)} {self._unit}".rstrip() + ", " if self._done else ""


def _tick_until(task: _PlainTask, ended: threading.Event) -> None:
    while not ended.wait(1.0):
        task.tick()
