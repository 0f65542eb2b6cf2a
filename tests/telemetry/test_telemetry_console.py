import io
import re
from typing import Any

import pytest
from rich.console import Console

import telemetry_examples as examples
from armillary.telemetry.console.choose import SilentConsole, open_console
from armillary.telemetry.console.live import LiveConsole
from armillary.telemetry.console.panel import Picture, TaskState
from armillary.telemetry.console.plain import PlainConsole
from armillary.telemetry.console.state import RunState
from armillary.telemetry.schema import checked_event
from armillary.telemetry.sparkline import sparkline


def event(kind: str, step: int, fields: dict[str, Any]) -> dict[str, Any]:
    time = examples.BEGUN + step * 0.5
    return checked_event(kind, time=time, rank=0, step=step, fields=fields)


def state_after(steps: int, *more: dict[str, Any], **start: Any) -> RunState:
    state = RunState()
    state.take(event("start", 0, examples.start(**start)))
    for number in range(1, steps + 1):
        state.take(event("step", number, examples.step(number)))
    for one in more:
        state.take(one)
    return state


def frame(state: RunState, width: int, *tasks: TaskState) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(Picture(state, tasks, 12.0))
    return "\n".join(line.rstrip() for line in console.export_text().splitlines())


FULL = """\
╭─ armillary starter ──────────────────────────────────────────────────────────────────────────────╮
│ loss     1.1429  █▇▇▆▆▅▅▅▄▄▄▄▄▃▃▃▃▃▃▃▃▃▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁                    │
│ held out 1.6320 bits/byte                                                                        │
│ update   gradient norm 0.93   learning rate 3.0e-04                                              │
│ speed    8,123 tokens/s                                                                          │
│ mfu      41.2 % of 327 GFLOP/s                                                                   │
│ memory   1.2 GiB peak   data wait 0.3 %                                                          │
│ left     40s   next checkpoint step 150                                                          │
│ ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╸                                       │
│ warning: the loader fell behind                                                                  │
╰──────────────────────────────────────────────────────────────────── step 120 / 200, 492K tokens ─╯
"""

NARROW = """\
╭─ armillary starter ──────────────────────────────────────╮
│ loss     1.1429  █▇▆▆▅▅▄▄▄▃▃▃▃▃▂▂▂▂▂▂▂▂▂▂▂▂▁▁▁▁▁▁▁▁▁▁▁▁▁ │
│ held out none yet                                        │
│ update   gradient norm 0.93   learning rate 3.0e-04      │
│ speed    8,123 tokens/s                                  │
│ mfu      n/a: unknown peak, run `armillary doctor`       │
│ memory   1.2 GiB peak   data wait 0.3 %                  │
│ left     n/a   next checkpoint n/a                       │
╰────────────────────────────────── step 120, 492K tokens ─╯"""

WAITING = """\
╭─ armillary starter ──────────────────────────────────────╮
│ loss     waiting for the first step                      │
╰─────────────────────────────────────────── step 0 / 200 ─╯
compiling blocks  12s
tokenising the stan… ━━━━━                 25% 12s, 36s left"""


def test_the_panel_shows_a_run_in_full():
    warning = event("warning", 120, {"message": "the loader fell behind", "where": "", "hint": ""})
    validation = event("validation", 120, examples.validation())
    assert frame(state_after(120, validation, warning, peak_flops=3.27e11), 100) + "\n" == FULL


def test_the_panel_fits_sixty_columns_and_says_what_is_unknown():
    state = state_after(120, total_steps=None, checkpoint_every=0)
    state.values["mfu"] = None
    assert frame(state, 60) == NARROW


def test_before_the_first_step_the_panel_waits_and_shows_the_work_in_progress():
    tasks = (
        TaskState("compiling blocks", None, "", 0.0),
        TaskState("tokenising the standard library", 2e6, "bytes", 0.0, 5e5),
    )
    assert frame(state_after(0), 60, *tasks) == WAITING


@pytest.mark.parametrize("width", [20, 40, 60, 79, 200])
def test_no_line_is_wider_than_the_terminal(width):
    state = state_after(
        30, event("warning", 30, {"message": "long " * 100, "where": "", "hint": ""})
    )
    assert max(map(len, frame(state, width).splitlines())) <= width


def test_a_step_without_a_finite_loss_shows_none_rather_than_a_number():
    bad = examples.step(31, loss=float("nan"), gradient_norm=float("inf"), mfu=None)
    text = frame(state_after(30, event("step", 31, bad)), 100)
    assert "loss     n/a" in text
    assert "gradient norm n/a" in text


def test_plain_records_have_the_promised_form_and_no_control_characters():
    stream = io.StringIO()
    console = PlainConsole(stream, log_every=10, background=False)
    console.on_event(event("start", 0, examples.start(resumed_from=7)))
    for number in range(8, 201):
        console.on_event(event("step", number, examples.step(number)))
    console.on_event(event("validation", 200, examples.validation()))
    for state in ("staged", "durable", "removed"):
        console.on_event(event("checkpoint", 200, examples.checkpoint(state)))
    console.on_event(event("sample", 200, {"prompt": "def ", "text": "f():\n\t\x1b[31mreturn\r"}))
    console.on_event(event("warning", 200, {"message": "slow", "where": "", "hint": "wait"}))
    trouble = {"message": "told by the command that fails", "where": "", "hint": ""}
    console.on_event(event("error", 200, trouble))
    console.on_event(event("stop", 200, {"reason": "finished", "exit_code": 0}))
    lines = stream.getvalue().splitlines()
    assert re.search(r"[\x00-\x09\x0b-\x1f\x7f]", stream.getvalue()) is None
    assert lines[0] == "training starter, 3.3M parameters, 1 rank, 200 steps, resumed from step 7"
    assert lines[1].startswith("step 8/200  loss 5.7143  grad 0.93  lr 3.0e-04  8,123 tok/s  mfu")
    assert lines[3] == (
        "step 20/200  loss 4.0000  grad 0.93  lr 3.0e-04  8,123 tok/s  mfu 41.2 %  "
        "mem 1.2 GiB  data 0.3 %  eta 1m30s"
    )
    assert len([line for line in lines if line.startswith("step")]) == 21
    assert lines[-5:] == [
        "validation at step 200  loss 3.1000  bits/byte 1.6320",
        "checkpoint of step 200 durable  37.8 MiB  in 0.3s",
        r"sample: def f():\n\t\x1b[31mreturn\r",
        "warning: slow (wait)",
        "stop: finished (exit code 0)",
    ]


def test_plain_progress_speaks_after_two_seconds_then_every_ten_and_at_the_end():
    clock, stream = examples.Ticks(0.0), io.StringIO()
    console = PlainConsole(stream, clock=clock, background=False)
    with console.task("reading", total=100, unit="files") as advance:
        for _ in range(100):
            clock.now += 0.25
            advance(1)
    with console.task("short", total=2) as advance:
        advance(2)
    assert stream.getvalue().splitlines() == [
        "reading: 8% of 100 files, 2.0s",
        "reading: 48% of 100 files, 12s",
        "reading: 88% of 100 files, 22s",
        "reading: done in 25s",
    ]


def test_work_that_fails_is_not_called_done():
    clock, stream = examples.Ticks(0.0), io.StringIO()
    console = PlainConsole(stream, clock=clock)
    with pytest.raises(KeyError), console.task("reading"):
        clock.now = 1.5
        raise KeyError
    assert stream.getvalue() == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "mode", "rank", "kind"),
    [
        (Terminal(), {}, "auto", 0, LiveConsole),
        (Terminal(), {"CI": "true"}, "auto", 0, PlainConsole),
        (Terminal(), {"CI": "false"}, "auto", 0, LiveConsole),
        (Terminal(), {"TERM": "dumb"}, "auto", 0, PlainConsole),
        (io.StringIO(), {}, "auto", 0, PlainConsole),
        (Terminal(), {}, "plain", 0, PlainConsole),
        (Terminal(), {}, "off", 0, SilentConsole),
        (Terminal(), {}, "auto", 1, SilentConsole),
    ],
)
def test_the_console_suits_the_place(stream, environment, mode, rank, kind):
    console = open_console(mode, rank=rank, stream=stream, environment=environment)
    assert type(console) is kind


def test_the_live_console_keeps_records_above_the_panel_and_gives_the_terminal_back():
    stream = Terminal()
    terminal = Console(file=stream, force_terminal=True, width=80, color_system=None)
    console = LiveConsole(terminal)
    with console.task("loading", total=10, unit="files") as advance:
        advance(10)
    console.on_event(event("start", 0, examples.start()))
    for number in range(1, 4):
        console.on_event(event("step", number, examples.step(number)))
    console.on_event(event("validation", 3, examples.validation()))
    console.on_event(event("stop", 3, {"reason": "finished", "exit_code": 0}))
    console.close()
    text = stream.getvalue()
    assert "validation at step 3  loss 3.1000" in text
    assert "step 3 / 200" in text
    assert "ended    finished" in text[text.rindex("╭") :]
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 2
    assert text.rindex("\x1b[?25h") > text.rindex("╰")


def test_a_curve_keeps_its_shape_and_its_bounds_however_long_it_is():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 3.0], 8) == "▁▁"
    assert sparkline([], 8) == ""
    state = state_after(5000)
    assert len(state.losses) <= 1024
    assert state.losses[0] > state.losses[-1]
    assert len(sparkline(state.losses, 60)) == 60
