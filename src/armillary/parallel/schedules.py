"""What is known of pipeline schedules before torch is loaded: their stages and microbatches."""

from __future__ import annotations

import csv
import itertools
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from armillary.foundation.divisors import divisors
from armillary.foundation.errors import Problem, UserError

if TYPE_CHECKING:
    from armillary.parallel.config import Parallel


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule of torch.distributed.pipelining."""

    least_stages: int
    """Stages of a rank, at least."""
    most_stages: int | None
    """Stages of a rank, at most; None: any number."""
    rule: str = "any"
    """Which numbers of microbatches it takes: any, stages (as many as stages, at least) or rounds
    (as many in each round of the ranks)."""
    v_shaped: bool = False
    """Whether stages go up through the ranks and down again, so that rank 0 has first and last."""

    def takes(self, microbatches: int, *, pp: int, stages: int) -> bool:
        """Whether a step of so many microbatches can be scheduled."""
        if self.rule == "stages":
            return microbatches >= stages
        return self.rule == "any" or microbatches % max(1, microbatches // pp) == 0


SCHEDULES = {
    "GPipe": Schedule(1, 1),
    "1F1B": Schedule(1, 1, "stages"),
    "Interleaved1F1B": Schedule(2, None, "rounds"),
    "LoopedBFS": Schedule(2, None),
    "InterleavedZeroBubble": Schedule(2, None, "rounds"),
    "ZBVZeroBubble": Schedule(2, 2, v_shaped=True),
    "DualPipeV": Schedule(2, 2, "stages", v_shaped=True),
}
"""GPipe: Huang et al. 2018, arXiv 1811.06965; 1F1B and its interleaving: Narayanan et al. 2021,
arXiv 2104.04473; looped BFS: Lamy-Poirier 2022, arXiv 2211.05953; zero bubble: Qi et al. 2023,
arXiv 2401.10241; V-shaped: Qi et al. 2024, arXiv 2405.15362; DualPipe: DeepSeek-AI 2024,
arXiv 2412.19437."""

_ACTION = re.compile(r"(\d{1,6})([FBIW])(\d{1,6})")


@dataclass(frozen=True, slots=True)
class Cell:
    """One action of a schedule's file: 0F3 is the forward pass of microbatch 3 in stage 0."""

    stage: int
    kind: str
    """F forward, B backward; or I and W, the backward pass in two: of activations, of weights."""
    microbatch: int
    line: int
    """From 1, as people count; line 1 is rank 0."""
    column: int
    """From 1; empty cells, where a rank idles, count too."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def place(self) -> str:
        """Where it stands in the file."""
        return f"line {self.line}, cell {self.column}"


@dataclass(frozen=True, slots=True)
class Table:
    """What a schedule's file says: one line per rank, one cell per moment, as 0F3 or 2B1."""

    lines: tuple[tuple[Cell, ...], ...]
    stages: int
    microbatches: int

    @property
    def ranks(self) -> int:
        """Lines of the file."""
        return len(self.lines)

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All of them, line after line."""
        return tuple(cell for line in self.lines for cell in line)


def is_file(schedule: str) -> bool:
    """Whether a schedule is the path of a table and not a name."""
    return schedule.lower().endswith(".csv")


def stages_per_rank(parallel: Parallel) -> int:
    """Stages of each pipeline rank, with 0 replaced by what the schedule needs."""
    if parallel.stages_per_rank or parallel.schedule not in SCHEDULES:
        return parallel.stages_per_rank or max(1, _stages_of_file(parallel) // parallel.pp)
    return SCHEDULES[parallel.schedule].least_stages


def takes(parallel: Parallel, microbatches: int) -> bool:
    """Whether the schedule can run a step of so many microbatches; without a pipeline, always.

    Args:
        parallel: an arrangement that is resolved and without problems.
        microbatches: of one step, on one rank.
    """
    if parallel.pp == 1:
        return True
    if parallel.schedule not in SCHEDULES:
        return microbatches == read_table(parallel.schedule).microbatches
    schedule = SCHEDULES[parallel.schedule]
    return schedule.takes(microbatches, pp=parallel.pp, stages=parallel.stages)


def rows_at_once(parallel: Parallel, share: int, wanted: int = 0) -> int:
    """Sequences of a microbatch: as wanted, or for 0 as many as the schedule allows.

    The fewest microbatches that the schedule takes leave each as large as can be: one without a
    pipeline. Where it takes no division of the share, that is the share, which is then refused.

    Args:
        parallel: an arrangement that is resolved and without problems.
        share: sequences of a step that a rank computes.
        wanted: `Budget.microbatch_sequences`.
    """
    if wanted or share < 1:
        return wanted or share
    return share // next((many for many in divisors(share) if takes(parallel, many)), 1)


@dataclass(frozen=True, slots=True)
class Deal:
    """How a data rank computes its share of a step."""

    rows: int
    """Sequences of a microbatch."""
    microbatches: int
    """Of one step."""
    padding: int = 0
    """Rows of a step, over all ranks, that hold no sequence."""


def deal(
    parallel: Parallel, sequences: int, data_size: int, wanted: int = 0, *, uneven: bool = False
) -> Deal:
    """Deals the sequences of a step to ranks and microbatches, evenly if that can be.

    What cannot be dealt evenly gets, where `uneven` allows it, as few more microbatches as the
    schedule takes and then as little padding as makes them equal.

    Args:
        parallel: an arrangement that is resolved and without problems.
        sequences: of a step, 1 or more.
        data_size: ranks that compute different sequences.
        wanted: `Budget.microbatch_sequences`; with padding, the most rows of a microbatch.
        uneven: `Budget.uneven`; without it the recipe is one that can be dealt evenly.
    """
    share, rest = divmod(sequences, data_size)
    rows = rows_at_once(parallel, share, wanted)
    if not uneven or not (rest or share % rows or not takes(parallel, share // rows)):
        return Deal(rows, share // rows)
    share = -(-sequences // data_size)
    if parallel.pp == 1 or parallel.schedule in SCHEDULES:
        least = -(-share // (wanted or share))
        many = next(many for many in itertools.count(least) if takes(parallel, many))
    else:
        many = read_table(parallel.schedule).microbatches
    rows = -(-share // many)
    return Deal(rows, many, rows * many * data_size - sequences)


def _stages_of_file(parallel: Parallel) -> int:
    return read_table(parallel.schedule).stages if is_file(parallel.schedule) else 0


def read_table(path: str) -> Table:
    """Reads the cells of a table; whether they can be run, `pipeline.table` says.

    Raises:
        UserError: it cannot be read, or a cell is no action.
    """
    try:
        file = Path(path).expanduser()
        if not stat.S_ISREG(file.stat().st_mode):  # a pipe would be waited for
            raise _no_table(path, "is no regular file")
        with file.open(newline="", encoding="utf-8") as text:
            rows = list(csv.reader(text))
    except (OSError, RuntimeError, ValueError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _no_table(path, f"cannot be read: {reason}") from error
    if not any(cell.strip() for row in rows for cell in row):
        raise _no_table(path, "holds no actions")
    lines = tuple(tuple(_cells(path, row, number)) for number, row in enumerate(rows, 1))
    cells = [cell for line in lines for cell in line]
    return Table(
        lines,
        stages=max(cell.stage for cell in cells) + 1,
        microbatches=max(cell.microbatch for cell in cells) + 1,
    )


def _cells(path: str, row: list[str], number: int) -> Iterator[Cell]:
    if not any(cell.strip() for cell in row):
        raise _no_table(path, f"has no action in line {number}")
    for column, text in enumerate(map(str.strip, row), 1):
        if not text:
            continue
        action = _ACTION.fullmatch(text)
        if action is None:
            raise _no_table(path, f"holds {text!r} in line {number}, cell {column}")
        yield Cell(int(action[1]), action[2], int(action[3]), number, column)


def _no_table(path: str, what: str) -> UserError:
    return UserError(
        Problem(
            f"parallel.schedule = {path} {what}",
            allowed="one line per rank of pp, cells such as 0F1 (stage 0, forward, microbatch 1)",
            fix="--parallel.schedule 1F1B",
        )
    )
