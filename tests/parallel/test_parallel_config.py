"""The arithmetic of the mesh, and errors that propose what is right."""

from __future__ import annotations

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

CASES = [
    (
        Parallel(dp_shard=3),
        8,
        "error: parallel.dp_shard = 3 does not cover the ranks: world size 8\n"
        "       allowed: on 8 ranks: 8\n"
        "       try: --parallel.dp-shard 8",
    ),
    (
        Parallel(dp_replicate=3),
        8,
        "error: parallel.dp_replicate = 3 does not divide the ranks: world size 8\n"
        "       allowed: on 8 ranks: 1, 2, 4, 8\n"
        "       try: --parallel.dp-replicate 4",
    ),
    (
        Parallel(dp_replicate=2, dp_shard=3),
        8,
        "error: parallel.dp_shard = 3 does not cover the ranks: world size 8, other axes take 2\n"
        "       allowed: on 8 ranks: 4\n"
        "       try: --parallel.dp-shard 4",
    ),
    (
        Parallel(dp_replicate=3, dp_shard=3),
        8,
        "error: parallel.dp_replicate = 3, parallel.dp_shard = 3: together 9 ranks, which does not "
        "fit a world size of 8\n"
        "       allowed: degrees whose product is 8\n"
        "       try: --parallel.dp-replicate 1 --parallel.dp-shard -1",
    ),
    (
        Parallel(dp_replicate=-1),
        8,
        "error: parallel.dp_replicate = -1 and parallel.dp_shard = -1 leave the arrangement open\n"
        "       allowed: one axis with -1\n"
        "       try: --parallel.dp-replicate 1",
    ),
    (
        Parallel(dp_shard=0, device="gpu"),
        1,
        "error: parallel.dp_shard = 0 is not a number of ranks\n"
        "       allowed: 1 or more, or -1 for the ranks that the other axes leave\n"
        "       try: --parallel.dp-shard -1\n"
        "error: parallel.device = gpu is no kind of device\n"
        "       allowed: auto, cpu, cuda\n"
        "       try: --parallel.device auto",
    ),
]


@pytest.mark.parametrize(("parallel", "world_size", "text"), CASES)
def test_an_arrangement_that_does_not_fit_is_refused_with_what_does(
    parallel: Parallel, world_size: int, text: str
) -> None:
    assert "\n".join(p.render() for p in parallel.problems(world_size)) == text


degree = st.sampled_from([-1, 1, 2, 3, 4, 6, 8])


@given(degree, degree, st.integers(1, 24))
def test_an_arrangement_without_problems_covers_every_rank_once(
    dp_replicate: int, dp_shard: int, world_size: int
) -> None:
    parallel = Parallel(dp_replicate=dp_replicate, dp_shard=dp_shard)
    if not parallel.problems(world_size):
        resolved = parallel.resolve(world_size)
        assert resolved.dp_replicate * resolved.dp_shard == world_size
        assert resolved.resolve(world_size) == resolved
        for axis, written in parallel.degrees.items():
            assert written in (-1, resolved.degrees[axis])
    else:
        fixes = [problem.fix for problem in parallel.problems(world_size)]
        assert all(fix and fix.startswith("--parallel.dp-") for fix in fixes)


def test_checkpointing_is_chosen_by_name_and_says_what_blocks_keep() -> None:
    choices = choices_of(ActivationCheckpointConfig)
    assert list(choices) == ["none", "full", "every-k", "selective"]
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
