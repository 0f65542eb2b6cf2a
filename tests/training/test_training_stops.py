"""Requests to stop on two ranks; `tests/reliability/stops.py` tries every phase."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from reliability.stops import PHASES, RANKS, Ground, trial, wait_for, wait_for_mark
from reliability.zygote import Zygote
from tiny_runs import events_of, steps_of

BY_NAME = {phase.name: phase for phase in PHASES}


@pytest.fixture(scope="module")
def ground(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground(zygote, tmp_path_factory.mktemp("stops"))


@pytest.mark.parametrize(
    ("number", "name", "asked", "by"),
    [
        (0, "learning the vocabulary", [1], signal.SIGUSR1),  # which waits for rank 0
        (1, "compressing", [1], signal.SIGINT),
    ],
    ids=["learning-the-vocabulary", "compressing"],
)
def test_all_ranks_stop_with_their_state_saved_whichever_was_asked(
    number: int, name: str, asked: list[int], by: signal.Signals, ground: Ground
) -> None:
    outcome = trial(ground, number, BY_NAME[name], asked=asked, by=by)
    assert not outcome.wrong, "\n".join(outcome.wrong)


def test_a_second_ctrl_c_inside_a_save_leaves_at_once_and_harms_nothing(ground: Ground) -> None:
    run, mark = ground.folder / "left", ground.folder / "left-mark"
    place = "armillary.checkpoint.writing:Writer.write"
    slow = {"place": place, "call": 2, "seconds": 600.0, "mark": str(mark), "ranks": [0, 1]}
    ranks = ground.start(run, ("--checkpoint.asynchronous", "false"), json.dumps(slow))
    wait_for_mark(ground, run, mark, ranks)
    for _ in range(2):
        for rank in ranks:
            rank.send(signal.SIGINT)
        time.sleep(1.2)  # less than a second apart, two are one
    assert wait_for(ranks) == [130] * RANKS
    durable = [e["step"] for e in events_of(run, "checkpoint") if e["state"] == "durable"]
    assert durable == [3]  # the second was under way

    assert ground.complete(run, ()) == [0] * RANKS
    assert events_of(run, "start")[-1]["resumed_from"] == 3
    last = {step["step"]: step for step in steps_of(run)}
    assert list(last.values()) == ground.steps


@pytest.mark.full  # it waits for ten seconds
def test_a_rank_that_waits_for_one_that_never_comes_can_be_stopped(
    ground: Ground, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    place = "armillary.parallel.process:init_process_group"
    slow = {"place": place, "call": 1, "seconds": 600.0, "mark": str(mark), "ranks": [1]}
    run = ground.folder / "alone"
    first, second = ground.start(run, (), json.dumps(slow))
    wait_for_mark(ground, run, mark, [first, second])
    first.send(signal.SIGTERM)
    assert first.wait() == 75
    second.kill()
    assert "stopped on request (SIGTERM)" in first.output()
