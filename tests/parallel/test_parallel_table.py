"""Schedules from files: what cannot run to its end is refused before any rank starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.cli.main import main
from armillary.parallel import Parallel
from armillary.parallel.pipeline.table import table_problems
from armillary.parallel.schedules import read_table, rows_at_once, takes

WRONG = {
    "a backward pass before the forward pass": (
        "0F0,0F1,0B0,0B1\n1B0,1F0,1F1,1B1\n",
        ["has 1B0 (line 2, cell 1) before 1F0"],
    ),
    "weights before activations": (
        "0F0,0W0,0I0\n1F0,1B0\n",
        ["has 0W0 (line 1, cell 2) before 0I0"],
    ),
    "a cell is missing": (
        "0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n",
        ["lacks cell 0B1 in line 1"],
    ),
    "half a backward pass": ("0F0,0I0\n1F0,1B0\n", ["lacks cell 0W0 in line 1"]),
    "no backward pass": (
        "0F0,0F1,0F2,0F3\n1F0,1F1,1F2,1F3\n",
        [f"lacks cell 0B{each} in line 1" for each in range(3)] + ["has more cells like these"],
    ),
    "twice and both ways": (
        "0F0,0B0,,0B0,0I0,0W0\n1F0,1B0\n",
        ["has cell 0B0 twice: line 1, cell 2, and line 1, cell 4",
         "has 0I0 (line 1, cell 5) beside 0B0, which is whole"],
    ),
    "ranks that wait for each other": (
        "1F0,1F1,1B0,1B1\n0F0,0B0,0F1,0B1\n",
        ["waits for ever: 1F1 (line 1, cell 2) needs 0F1 (line 2, cell 3); "
         "0B0 (line 2, cell 2) needs 1B0 (line 1, cell 3)"],
    ),
    "on two ranks": ("0F0,1B0\n1F0,0B0\n", ["has stage 1 in lines 1, 2"]),
    "unevenly": (
        "0F0,2F0,2B0,3F0,3B0,0B0\n1F0,1B0\n", ["has 3, 1 stages in its lines"],
    ),
    "an empty line": ("0F0,0B0\n\n1F0,1B0\n", ["has no action in line 2"]),
    "an endless number": ("0F0,0B99999999\n", ["holds '0B99999999' in line 1, cell 2"]),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_table_that_cannot_be_run_is_refused_by_line_and_cell(case: str, tmp_path: Path) -> None:
    text, told = WRONG[case]
    path = tmp_path / "own.csv"
    path.write_text(text)
    found = Parallel(pp=2, schedule=str(path)).problems(2)
    start = f"parallel.schedule = {path} "
    assert [problem.message.removeprefix(start) for problem in found] == told


def test_the_command_line_refuses_it_and_a_pipe_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.csv").write_text(WRONG["ranks that wait for each other"][0])
    os.mkfifo(tmp_path / "pipe.csv")
    mesh = ["debug", "--parallel.pp", "2", "--parallel.schedule"]
    for file, told in (("own.csv", "waits for ever"), ("pipe.csv", "is no regular file")):
        assert main(["mesh", *mesh, str(tmp_path / file)]) == 2
        assert told in capsys.readouterr().err
        typed = ["train", *mesh, str(tmp_path / file), "--nproc", "2", "--run", str(tmp_path / "r")]
        assert main(typed) == 2
        assert told in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


@given(ranks=st.integers(1, 4), microbatches=st.integers(1, 6), split=st.booleans())
def test_what_one_stage_does_after_the_other_is_a_table(
    tmp_path_factory: pytest.TempPathFactory, ranks: int, microbatches: int, split: bool
) -> None:
    back = ("I", "W") if split else ("B",)
    lines = [
        [f"{stage}F{each}" for each in range(microbatches)]
        + [f"{stage}{kind}{each}" for each in range(microbatches) for kind in back]
        for stage in range(ranks)
    ]
    path = tmp_path_factory.getbasetemp() / "in_turn.csv"
    path.write_text("\n".join(map(",".join, lines)) + "\n")
    table = read_table(str(path))
    assert (table.ranks, table.stages, table.microbatches) == (ranks, ranks, microbatches)
    assert table_problems(str(path)) == []
    if ranks > 1:
        own = Parallel(pp=ranks, schedule=str(path))
        assert [each for each in range(1, 9) if takes(own, each)] == [microbatches]
        assert rows_at_once(own, 3 * microbatches) == 3


@pytest.mark.parametrize(
    ("parallel", "share", "wanted", "rows"),
    [
        (Parallel(dp_shard=1), 16, 0, 16),
        (Parallel(dp_shard=1), 16, 2, 2),
        (Parallel(pp=2), 16, 0, 8),
        (Parallel(pp=2), 16, 1, 1),
        (Parallel(pp=4), 6, 0, 1),
        (Parallel(pp=8), 4, 0, 4),
        (Parallel(pp=2, schedule="GPipe"), 6, 0, 6),
        (Parallel(pp=2, schedule="DualPipeV"), 12, 0, 3),
    ],
    ids=str,
)
def test_left_open_a_microbatch_is_as_large_as_the_schedule_allows(
    parallel: Parallel, share: int, wanted: int, rows: int
) -> None:
    assert rows_at_once(parallel, share, wanted) == rows
