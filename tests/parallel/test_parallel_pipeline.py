"""Pipelines on real ranks: every schedule gives the answer of one process."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_cases import Case, Trace, traces

from armillary.foundation.errors import UserError
from armillary.parallel import Full, Parallel, Scale, Selective
from armillary.precision import Precision
from ranks import run_ranks

TABLE = """0F0,0F1,,0B0,0F2,0B1,0F3,0B2,0B3
,1F0,1I0,1F1,1W0,1B1,1F2,1B2,1F3,1B3
"""
"""Four microbatches on two ranks, one of them with a split backward pass."""

BACKWARDS = "1F0,1F1,1B1,1B0\n0F0,0F1,0B0,0B1\n"
"""The first stage on the last rank, and backward passes that cross on their way."""

NAMES = (
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
TOLERANCE = 1e-5
"""Relative, of sums over other orders; the worst seen is 3e-6."""


def _case(schedule: str, *, tied: bool = True, microbatches: int = 4, **fields: Any) -> Case:
    recomputed, compute = fields.pop("recomputed", None), fields.pop("compute", "float32")
    scale = Scale(
        parallel=Parallel(schedule=schedule, **fields), precision=Precision(compute=compute)
    )
    if recomputed is not None:
        scale = replace(scale, activation_checkpoint=recomputed)
    return Case(scale=scale, microbatches=microbatches, tied=tied)


@functools.cache
def _one_process(tied: bool, compute: str = "float32", microbatches: int = 1) -> Trace:
    (trace,) = traces([_case("1F1B", tied=tied, microbatches=microbatches, compute=compute)])
    return trace


def test_every_schedule_gives_the_answer_of_one_process(tmp_path: Path) -> None:
    table = tmp_path / "own.csv"
    table.write_text(TABLE)
    backwards = tmp_path / "backwards.csv"
    backwards.write_text(BACKWARDS)
    cases = [_case(name, pp=2, tied=index % 2 == 0) for index, name in enumerate(NAMES)]
    cases += [
        _case(str(table), pp=2),
        _case(str(backwards), pp=2, microbatches=2),
        _case("LoopedBFS", pp=2, stages_per_rank=3, microbatches=2),
        _case("1F1B", pp=2, stage_layers=(3, 5), recomputed=Selective()),
        _case("ZBVZeroBubble", pp=2, recomputed=Full()),
    ]
    # In bfloat16 gradients are those of the same microbatches only if they add up in float32.
    lower = [
        _case(name, pp=2, tied=False, microbatches=8, compute="bfloat16")
        for name in ("1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    ]
    by_rank = _assert_same_answers(cases, 2, more=lower)
    expected = _one_process(False, "bfloat16", 8)
    first = {name: value for name, value in expected.numbers.items() if name.endswith(" 0")}
    for rank in by_rank:
        for trace, case in zip(rank, lower, strict=True):
            found = {name: trace.numbers[name] for name in first}
            assert found == pytest.approx(first, rel=1e-9), case.scale.parallel.schedule


def test_pipelines_of_four_and_pipelines_of_sharded_stages_give_the_answer_of_one_process() -> None:
    sharded: dict[str, Any] = {"pp": 2, "dp_shard": 2}
    _assert_same_answers(
        [
            _case("1F1B", **sharded),
            _case("Interleaved1F1B", **sharded, tied=False),
            _case("ZBVZeroBubble", **sharded, recomputed=Full()),
            _case("DualPipeV", pp=2, dp_replicate=2),
            _case("1F1B", pp=4),
            _case("ZBVZeroBubble", pp=4, microbatches=8),
        ],
        4,
    )


def _assert_same_answers(
    cases: list[Case], world_size: int, more: Sequence[Case] = ()
) -> list[list[Trace]]:
    """Compares runs with the one in one process; returns those of `more` cases, by rank."""
    by_rank = run_ranks(traces, world_size, [*cases, *more])
    for index, case in enumerate(cases):
        ranks: list[Trace] = [rank[index] for rank in by_rank]
        expected, what = _one_process(case.tied), str(case.scale.parallel)
        initial = _together([trace.initial for trace in ranks], case.tied)
        assert initial == expected.initial, what
        _together([trace.final for trace in ranks], case.tied)
        for trace in ranks:
            assert trace.numbers == pytest.approx(expected.numbers, rel=TOLERANCE, abs=0), what
            for found, wanted in zip(trace.logits, expected.logits, strict=True):
                torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    return [rank[len(cases) :] for rank in by_rank]


def _together(digests: list[dict[str, str]], tied: bool) -> dict[str, str]:
    """What all ranks hold; of what several hold, the same."""
    found: dict[str, set[str]] = {}
    for rank in digests:
        for name, digest in rank.items():
            canonical = "embedding.weight" if tied and name == "head.weight" else name
            found.setdefault(canonical, set()).add(digest)
    assert all(len(values) == 1 for values in found.values()), "copies differ"
    return {name: values.pop() for name, values in found.items()}


def _refusals(cases: list[Case]) -> list[str]:
    found = []
    for case in cases:
        with pytest.raises(UserError) as error:
            traces([case])
        found.append(str(error.value.problems[0].message))
    return found


def test_what_cannot_be_scheduled_is_refused_by_all_ranks_before_they_communicate(
    tmp_path: Path,
) -> None:
    table = tmp_path / "own.csv"
    table.write_text(TABLE)
    cases = [
        _case("1F1B", pp=2, microbatches=1),
        _case(str(table), pp=2, microbatches=2),
        _case("Interleaved1F1B", pp=2, stages_per_rank=5),
        _case("1F1B", pp=2, stage_layers=(3, 4)),
    ]
    first, second = run_ranks(_refusals, 2, cases)
    assert first == second
    for message, part in zip(
        first,
        (
            "cannot be run with 1 microbatches",
            "cannot be run with 2 microbatches",
            "10 stages of a pipeline are more than 8 layers",
            "parallel.stage_layers has 7 layers, and the model 8",
        ),
        strict=True,
    ):
        assert part in message
