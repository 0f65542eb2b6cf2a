"""Which rank holds which stage of a pipeline. Arithmetic only, no torch."""

from __future__ import annotations

from armillary.foundation.errors import Problem, UserError
from armillary.parallel.config import Parallel
from armillary.parallel.schedules import SCHEDULES, is_file, read_table, stages_per_rank


def rank_of_stages(parallel: Parallel) -> tuple[int, ...]:
    """The pipeline rank of each stage, first to last.

    A table says so itself. V-shaped schedules go up through the ranks and down again, so that the
    first and the last stage meet on rank 0; all others go round and round.

    Args:
        parallel: an arrangement that is resolved and without problems.

    Raises:
        UserError: a table has a stage on two ranks or on none, or is not in order.
    """
    pp = parallel.pp
    if pp == 1:
        return (0,)
    if is_file(parallel.schedule):
        return _of_table(parallel.schedule)
    stages = range(pp * stages_per_rank(parallel))
    if SCHEDULES[parallel.schedule].v_shaped:
        return tuple(min(stage, len(stages) - 1 - stage) for stage in stages)
    return tuple(stage % pp for stage in stages)


def _of_table(path: str) -> tuple[int, ...]:
    ranks: dict[int, int] = {}
    last: dict[int, int] = {}
    for cell in read_table(path).cells:
        stage, rank = cell.stage, cell.line - 1
        if ranks.setdefault(stage, rank) != rank:
            lines = f"{ranks[stage] + 1}, {cell.line}"
            raise _not_a_pipeline(path, f"has stage {stage} in lines {lines}")
        if cell.kind != "F":
            continue
        # torch numbers losses in the order in which they are computed
        if cell.microbatch != last.get(stage, -1) + 1:
            raise _not_a_pipeline(path, f"has cell {cell} out of its order ({cell.place})")
        last[stage] = cell.microbatch
    if sorted(ranks) != list(range(len(ranks))):
        raise _not_a_pipeline(path, f"has stages {sorted(ranks)} only")
    return tuple(ranks[stage] for stage in range(len(ranks)))


def _not_a_pipeline(path: str, what: str) -> UserError:
    return UserError(
        Problem(
            f"parallel.schedule = {path} {what}",
            allowed="each stage from 0 in one line, its forward cells by ascending microbatch",
            fix="--parallel.schedule 1F1B",
        )
    )
