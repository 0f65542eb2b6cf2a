"""The arithmetic of the mesh, and errors that propose what is right."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.foundation.component import choices_of
from armillary.parallel import (
    ActivationCheckpointConfig,
    Compile,
    EveryK,
    Full,
    Parallel,
    Selective,
)
from armillary.parallel.grid import DENSE_AXES
from armillary.parallel.schedules import read_table

ONE = "1 or more, or -1 for the ranks that the other axes leave"

CASES: dict[str, tuple[Parallel, int, list[tuple[str, str, str]]]] = {
    "no open axis": (
        Parallel(dp_shard=3),
        8,
        [("parallel.dp_shard = 3 does not cover the ranks: world size 8", "on 8 ranks: 8",
          "--parallel.dp-shard 8")],
    ),
    "an axis that does not divide": (
        Parallel(tp=3),
        8,
        [("parallel.tp = 3 does not divide the ranks: world size 8", "on 8 ranks: 1, 2, 4, 8",
          "--parallel.tp 4")],
    ),
    "beside others": (
        Parallel(pp=2, cp=3, tp=2),
        24 // 3,
        [("parallel.cp = 3 does not divide the ranks: world size 8, other axes take 4",
          "on 8 ranks: 1, 2", "--parallel.cp 2")],
    ),
    "two wrong": (
        Parallel(dp_replicate=3, dp_shard=3),
        8,
        [("parallel.dp_replicate = 3, parallel.dp_shard = 3: together 9 ranks, which does not fit "
          "a world size of 8", "degrees whose product is 8",
          "--parallel.dp-replicate 4 --parallel.dp-shard -1")],
    ),
    "two open": (
        Parallel(tp=-1, pp=-1),
        8,
        [("parallel.pp = -1 and parallel.dp_shard = -1 and parallel.tp = -1 leave the arrangement "
          "open", "one axis with -1", "--parallel.pp 1 --parallel.tp 1")],
    ),
    "no numbers of ranks": (
        Parallel(dp_shard=0, cp=-2, ep=0, device="gpu"),
        1,
        [("parallel.dp_shard = 0 is not a number of ranks", ONE, "--parallel.dp-shard -1"),
         ("parallel.cp = -2 is not a number of ranks", ONE, "--parallel.cp 1"),
         ("parallel.ep = 0 is not a number of ranks", "1 or more", "--parallel.ep 1"),
         ("parallel.device = gpu is no kind of device", "auto, cpu, cuda",
          "--parallel.device auto")],
    ),
    "experts": (
        Parallel(pp=2, tp=2, ep=3),
        16,
        [("parallel.ep = 3 does not divide dp_shard x cp x tp = 8 ranks", "1, 2, 4, 8",
          "--parallel.ep 4")],
    ),
    "experts in pieces": (
        Parallel(tp=2, ep=8, expert_tp=2),
        8,
        [("parallel.ep = 8 does not divide dp_shard x cp = 4 ranks", "1, 2, 4",
          "--parallel.ep 4")],
    ),
    "pieces of experts": (
        Parallel(tp=4, expert_tp=2),
        8,
        [("parallel.expert_tp = 2 is neither 1 nor parallel.tp = 4", "1, 4",
          "--parallel.expert-tp 4")],
    ),
    "words": (
        Parallel(schedule="1f1b", context="rings", context_balance="tail", prefetch=-1),
        1,
        [("parallel.context = rings is no kind of context parallelism",
          "all-gather, ring, ulysses", "--parallel.context ring"),
         ("parallel.context_balance = tail is no way to balance context", "head-tail, none",
          "--parallel.context-balance head-tail"),
         ("parallel.schedule = 1f1b is no schedule",
          "GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, "
          "DualPipeV, or the path of a .csv", "--parallel.schedule 1F1B"),
         ("parallel.prefetch = -1 is out of range", "0 or more", "--parallel.prefetch 0")],
    ),
    "host memory of one rank": (
        Parallel(cpu_offload=True),
        1,
        [("parallel.cpu_offload = true keeps shards in host memory, and one rank has no shards",
          "2 ranks or more", "--parallel.cpu-offload false")],
    ),
    "one stage each": (
        Parallel(pp=2, stages_per_rank=2),
        2,
        [("parallel.stages_per_rank = 2 does not go with parallel.schedule = 1F1B",
          "0 (as the schedule needs), 1", "--parallel.stages-per-rank 1")],
    ),
    "two stages each": (
        Parallel(pp=2, stages_per_rank=3, schedule="DualPipeV"),
        2,
        [("parallel.stages_per_rank = 3 does not go with parallel.schedule = DualPipeV",
          "0 (as the schedule needs), 2", "--parallel.stages-per-rank 2")],
    ),
    "several stages each": (
        Parallel(pp=2, stages_per_rank=1, schedule="LoopedBFS"),
        2,
        [("parallel.stages_per_rank = 1 does not go with parallel.schedule = LoopedBFS",
          "0 (as the schedule needs), 2 or more", "--parallel.stages-per-rank 2")],
    ),
    "layers of stages": (
        Parallel(pp=2, stage_layers=(3, 0, 5)),
        2,
        [("parallel.stage_layers names 3 stages, and there are 2: pp = 2 ranks of 1",
          "2 numbers of layers, or none of them: cut by estimated cost",
          "--parallel.stage-layers ''"),
         ("parallel.stage_layers = 3, 0, 5 leaves a stage without layers",
          "1 or more for each stage", "--parallel.stage-layers ''")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_arrangement_that_does_not_fit_is_refused_with_what_does(case: str) -> None:
    parallel, world_size, told = CASES[case]
    found = parallel.problems(world_size)
    assert [(p.message, p.allowed, p.fix) for p in found] == told


degree = st.sampled_from([-1, 1, 2, 3, 4, 6, 8])


@given(st.lists(degree, min_size=5, max_size=5), st.integers(1, 48), st.sampled_from([1, 2, 3]))
def test_an_arrangement_without_problems_covers_every_rank_once(
    written: list[int], world_size: int, ep: int
) -> None:
    degrees = dict(zip(DENSE_AXES, written, strict=True))
    parallel = Parallel(**degrees, ep=ep)
    if not parallel.problems(world_size):
        resolved = parallel.resolve(world_size)
        assert resolved.grid.world_size == world_size
        assert resolved.resolve(world_size) == resolved
        assert all(each in (-1, resolved.degrees[axis]) for axis, each in degrees.items())
        return
    for _ in range(4):  # a fix may uncover the next problem
        for problem in parallel.problems(world_size):
            assert problem.fix is not None
            words = problem.fix.split()
            changes = dict(zip(words[::2], words[1::2], strict=True))
            fields = {name.removeprefix("--parallel."): value for name, value in changes.items()}
            parallel = dataclasses.replace(
                parallel, **{name.replace("-", "_"): int(each) for name, each in fields.items()}
            )
    assert parallel.problems(world_size) == []


TABLE = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"


def test_a_schedule_of_ones_own_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(TABLE)
    parallel = Parallel(pp=2, schedule=str(path))
    assert parallel.problems(4) == []
    assert parallel.resolve(4).stages == 2
    assert read_table(str(path)).microbatches == 2
    wrong = {
        "3 ranks": (Parallel(pp=3, schedule=str(path)), TABLE, "is for 2 ranks"),
        "stages": (Parallel(pp=2, stages_per_rank=2, schedule=str(path)), TABLE, "has 2 stages"),
        "cell": (parallel, "0F0\n1F0,what\n", "holds 'what' in line 2, cell 2"),
        "empty": (parallel, "\n\n", "holds no actions"),
        "order": (parallel, "0F1,0F0\n1F0,1F1\n", "out of its order"),
    }
    for case, text, message in wrong.values():
        path.write_text(text)
        (problem,) = case.problems(6 if case.pp == 3 else 4)
        assert message in problem.message
    path.unlink()
    assert "cannot be read: No such file" in parallel.problems(4)[0].message


def test_checkpointing_is_chosen_by_name_and_says_what_blocks_keep() -> None:
    choices = choices_of(ActivationCheckpointConfig)
    assert list(choices) == [
        "none", "full", "every-k", "selective", "offload", "memory-budget",
    ]  # fmt: skip
    kept = {name: [choice().kept(block) for block in range(3)] for name, choice in choices.items()}
    assert kept["none"] == [None] * 3
    assert kept["full"] == [()] * 3
    assert kept["every-k"] == [(), None, ()]
    assert kept["selective"] == [Selective().save] * 3


def test_values_that_make_no_sense_are_named() -> None:
    assert Full().problems() == [] == Selective().problems() == Compile().problems()
    assert "k = 0" in EveryK(k=0).problems()[0].message
    wrong = Selective(save=("mm", "aten::mm", "aten::mmm", "aten::silu")).problems()
    assert ["'mm'" in wrong[0].message, "'aten::mmm'" in wrong[1].message] == [True, True]
    assert wrong[1].fix == "--activation-checkpoint.save '[\"aten::mm\"]'"
    assert len(wrong) == 2
    assert Compile(backend="eager").problems() == []
    (problem,) = Compile(backend="aot_eager", mode="max-autotune").problems()
    assert problem.fix == "--compile.mode default"
    problems = Compile(backend="llvm", mode="fast").problems()
    assert [problem.fix for problem in problems] == [
        "--compile.backend inductor",
        "--compile.mode default",
    ]
