"""The live panel as a picture of a state: no clock, no terminal, no side effects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import ASCII, ROUNDED, Box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from armillary.telemetry.console.state import RunState
from armillary.telemetry.format import byte_count, duration, flop_rate, number, percent, quantity
from armillary.telemetry.sparkline import sparkline
from armillary.telemetry.text import printable

_LABEL_WIDTH = 8
_FRAME_WIDTH = 4
_LONGEST_CURVE = 60
_UNKNOWN_PEAK = "n/a: unknown peak, run `armillary doctor`"


@dataclass(slots=True)
class TaskState:
    """A piece of long work in progress."""

    label: str
    total: float | None
    unit: str
    begun: float
    done: float = 0.0


@dataclass(frozen=True, slots=True)
class Picture:
    """Renderable: the panel of a run, if it has begun, and the work in progress below it."""

    state: RunState
    tasks: Sequence[TaskState]
    now: float
    """Clock of the tasks, in seconds."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        if self.state.started is not None:
            yield run_panel(self.state, width, box=ASCII if options.ascii_only else ROUNDED)
        for task in self.tasks:
            yield task_line(task, self.now, width)


def run_panel(state: RunState, width: int, *, box: Box = ROUNDED) -> Panel:
    """The panel of a run, `width` characters wide."""
    inside = width - _FRAME_WIDTH
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=_LABEL_WIDTH, style="dim", no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    if state.values:
        for label, value in _rows(state, inside - _LABEL_WIDTH - 1, unicode=box is not ASCII):
            grid.add_row(label, value)
    else:
        grid.add_row("loss", Text("waiting for the first step"))
    below = Table.grid()
    below.add_column(width=inside, no_wrap=True, overflow="ellipsis")
    if state.total_steps and state.values:
        below.add_row(ProgressBar(total=state.total_steps, completed=state.step, width=inside))
    if state.warning:
        below.add_row(Text(printable(f"warning: {state.warning}"), style="yellow"))
    title = Text(f"armillary {state.recipe}".rstrip())
    return Panel(
        Group(grid, below) if below.row_count else grid,
        title=title,
        title_align="left",
        subtitle=Text(_subtitle(state)),
        subtitle_align="right",
        width=width,
        box=box,
    )


def _rows(state: RunState, width: int, *, unicode: bool) -> list[tuple[str, Text]]:
    values = state.values
    loss = f"{number(values['loss'], '.4f')}"
    curve = sparkline(state.losses, min(_LONGEST_CURVE, width - len(loss) - 2)) if unicode else ""
    mfu = values["mfu"]
    peak = "" if state.peak_flops is None else f" of {flop_rate(state.peak_flops)}"
    if mfu is not None:
        utilisation = percent(mfu) + peak
    else:
        utilisation = _UNKNOWN_PEAK if state.peak_flops is None else "n/a"
    gradient, rate = number(values["gradient_norm"], ".3g"), number(values["learning_rate"], ".1e")
    validation = f"{number(state.bits_per_byte, '.4f')} bits/byte"
    if state.bits_per_byte is None:
        validation = "none yet"
    return [
        ("loss", Text.assemble((loss, "bold"), "  ", (curve, "cyan"))),
        ("held out", Text(validation)),
        ("update", Text(f"gradient norm {gradient}   learning rate {rate}")),
        ("speed", Text(f"{number(values['tokens_per_second'], ',.0f')} tokens/s")),
        ("mfu", Text(utilisation)),
        (
            "memory",
            Text(
                f"{byte_count(values['memory_peak_bytes'])} peak   "
                f"data wait {percent(state.data_share())}"
            ),
        ),
        _end(state),
    ]


def _end(state: RunState) -> tuple[str, Text]:
    """What is left of the run, or how it ended."""
    if state.stopped:
        return "ended", Text(printable(state.stopped))
    checkpoint = state.next_checkpoint()
    following = "n/a" if checkpoint is None else f"step {checkpoint:,}"
    return "left", Text(f"{duration(state.seconds_left())}   next checkpoint {following}")


def _subtitle(state: RunState) -> str:
    total = "" if state.total_steps is None else f" / {state.total_steps:,}"
    tokens = state.values.get("tokens_total")
    seen = "" if tokens is None else f", {quantity(tokens)} tokens"
    return f"step {state.step:,}{total}{seen}"


def task_line(task: TaskState, now: float, width: int) -> RenderableType:
    """One line of work in progress: label, bar or amount, time."""
    elapsed = duration(now - task.begun)
    label = Text(printable(task.label), no_wrap=True, overflow="ellipsis")
    line = Table.grid(padding=(0, 1), expand=False)
    line.add_column(max_width=max(10, width // 3), no_wrap=True, overflow="ellipsis")
    for _ in range(2):
        line.add_column(no_wrap=True)
    if task.total:
        share = min(1.0, task.done / task.total)
        bar = ProgressBar(total=task.total, completed=task.done, width=max(8, width // 3))
        left = ""
        if 0 < share < 1:
            left = f", {duration((now - task.begun) * (1 - share) / share)} left"
        line.add_row(label, bar, Text(f"{share:4.0%} {elapsed}{left}"))
    else:
        amount = f"{quantity(task.done)} {task.unit} ".lstrip() if task.done else ""
        line.add_row(label, Text(amount), Text(elapsed))
    return line
