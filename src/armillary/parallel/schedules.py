"""What is known of pipeline schedules before torch is loaded: their stages and microbatches."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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

_ACTION = re.compile(r"(\d+)(F|B|I|W|[A-Z_]+)(\d*)")


@dataclass(frozen=True, slots=True)
class Table:
    """What a schedule's file says: one line per rank, one cell per moment, as 0F3 or 2B1."""

    ranks: int
    stages: int
    microbatches: int


def is_file(schedule: str) -> bool:
    """Whether a schedule is the path of a table and not a name."""
    return schedule.lower().endswith(".csv")


def stages_per_rank(parallel: Parallel) -> int:
    """Stages of each pipeline rank, with 0 replaced by what the schedule needs."""
    if parallel.stages_per_rank or parallel.schedule not in SCHEDULES:
        return parallel.stages_per_rank or max(1, _stages_of_file(parallel) // parallel.pp)
    return SCHEDULES[parallel.schedule].least_stages


def _stages_of_file(parallel: Parallel) -> int:
    return read_table(parallel.schedule).stages if is_file(parallel.schedule) else 0


def read_table(path: str) -> Table:
    """Counts ranks, stages and microbatches of a table; the pipeline itself reads its order.

    Raises:
        UserError: it cannot be read, or a cell is no action.
    """
    try:
        with Path(path).expanduser().open(newline="", encoding="utf-8") as file:
            lines = [line for line in csv.reader(file) if line]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _no_table(path, f"cannot be read: {reason}") from error
    stages, microbatches = set(), set()
    for number, line in enumerate(lines):
        for cell in filter(None, map(str.strip, line)):
            action = _ACTION.fullmatch(cell)
            if action is None:
                raise _no_table(path, f"holds {cell!r} in line {number + 1}")
            stages.add(int(action[1]))
            if action[3]:
                microbatches.add(int(action[3]))
    if not microbatches:
        raise _no_table(path, "holds no actions")
    return Table(len(lines), max(stages) + 1, max(microbatches) + 1)


def _no_table(path: str, what: str) -> UserError:
    return UserError(
        Problem(
            f"parallel.schedule = {path} {what}",
            allowed="one line per rank of pp, cells such as 0F1 (stage 0, forward, microbatch 1)",
            fix="--parallel.schedule 1F1B",
        )
    )
