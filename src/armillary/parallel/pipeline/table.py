"""Whether a schedule's file can be run to its end: all cells, in an order that waits for none.

Arithmetic only, no torch: a file is refused before any rank starts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from armillary.foundation.errors import Problem
from armillary.parallel.schedules import Cell, Table, read_table

_MOST = 3
"""Faults of one kind that are told."""

_Key = tuple[int, str, int]
"""Stage, kind and microbatch. Of two backward cells only I is waited for, so B is I as well."""

_WAITS_WITHIN = {"B": "F", "I": "F", "W": "I"}
"""By kind, what the same stage computes before."""


def table_problems(path: str) -> list[Problem]:
    """Why a table cannot be run; only for one whose stages have their ranks (`rank_of_stages`).

    Args:
        path: of a file that `read_table` reads.
    """
    table = read_table(path)
    for check in (_incomplete, _disordered, _stuck):
        faults = list(itertools.islice(check(table), _MOST + 1))
        if faults:
            more = ["has more cells like these"] if len(faults) > _MOST else []
            return [_problem(path, fault) for fault in [*faults[:_MOST], *more]]
    return []


def _problem(path: str, fault: str) -> Problem:
    return Problem(
        f"parallel.schedule = {path} {fault}",
        allowed="for each stage and microbatch F, then B or I and W, once, none before what it "
        "needs from the stages beside it",
        fix="--parallel.schedule 1F1B",
    )


def _incomplete(table: Table) -> Iterator[str]:
    """Each stage computes each microbatch forward and backward, once."""
    found: dict[_Key, Cell] = {}
    for cell in table.cells:
        first = found.setdefault(_own(cell), cell)
        if first is not cell:
            yield f"has cell {cell} twice: {first.place}, and {cell.place}"
    lines = {cell.stage: cell.line for cell in table.cells}
    for stage, microbatch in itertools.product(range(table.stages), range(table.microbatches)):
        have = [kind for kind in "FBIW" if (stage, kind, microbatch) in found]
        if "B" in have and len(have) > 2:
            split = found[stage, have[2], microbatch]
            yield f"has {split} ({split.place}) beside {stage}B{microbatch}, which is whole"
            continue
        wanted = "FIW" if "I" in have or "W" in have else "FB"
        for kind in wanted:
            if kind not in have:
                yield f"lacks cell {stage}{kind}{microbatch} in line {lines[stage]}"


def _disordered(table: Table) -> Iterator[str]:
    """What a line has before that which itself computes first."""
    for line in table.lines:
        seen: set[_Key] = set()
        for cell in line:
            before = _WAITS_WITHIN.get(cell.kind)
            if before and (cell.stage, before, cell.microbatch) not in seen:
                yield f"has {cell} ({cell.place}) before {cell.stage}{before}{cell.microbatch}"
            seen.add(_own(cell))


def _stuck(table: Table) -> Iterator[str]:
    """Lets the ranks run; tells of those that would wait for ever."""
    done: set[_Key] = set()
    left = [iter(line) for line in table.lines]
    next_cells: list[Cell | None] = [next(cells) for cells in left]
    progress = True
    while progress:
        progress = False
        for rank, cells in enumerate(left):
            cell = next_cells[rank]
            while cell is not None and _missing(cell, table.stages, done) is None:
                done.add(_as_waited_for(cell))
                cell = next(cells, None)
                progress = True
            next_cells[rank] = cell
    waiting = [cell for cell in next_cells if cell is not None]
    if waiting:
        told = "; ".join(_wait(cell, table, done) for cell in waiting[:_MOST])
        yield f"waits for ever: {told}"


def _wait(cell: Cell, table: Table, done: set[_Key]) -> str:
    missing = _missing(cell, table.stages, done)
    assert missing is not None, cell
    wanted = next(other for other in table.cells if _as_waited_for(other) == missing)
    return f"{cell} ({cell.place}) needs {wanted} ({wanted.place})"


def _missing(cell: Cell, stages: int, done: set[_Key]) -> _Key | None:
    """What a cell needs of another stage and has not got; what its own line has, comes first."""
    if cell.kind == "W":
        return None
    beside = cell.stage - 1 if cell.kind == "F" else cell.stage + 1
    needed = (beside, "F" if cell.kind == "F" else "I", cell.microbatch)
    return None if not 0 <= beside < stages or needed in done else needed


def _own(cell: Cell) -> _Key:
    return cell.stage, cell.kind, cell.microbatch


def _as_waited_for(cell: Cell) -> _Key:
    return cell.stage, "I" if cell.kind == "B" else cell.kind, cell.microbatch
