"""Ranks that are lost or added: the run goes on with those that are there, and gives one answer."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from armillary.recipe.toml import to_toml
from reliability import elastic, network, nodes
from reliability.agents import write_slow_recipe
from reliability.zygote import Process, Zygote
from tiny_runs import events_of, steps_of, tiny_recipe, write_corpus

STEPS = 24
RELATIVE = 1e-5
TIMEOUT = 90.0
"""Seconds in which ranks must have ended; hangs would last ten minutes or more."""


def reached(run: Path, step: int, ranks: list[Process]) -> None:
    """Waits for a step in the log."""
    deadline = time.monotonic() + TIMEOUT
    while not (run / "events.jsonl").exists() or not any(
        event["step"] >= step for event in events_of(run, "step")
    ):
        alive = all(rank.poll() is None for rank in ranks)
        assert alive and time.monotonic() < deadline, "".join(rank.output() for rank in ranks)
        time.sleep(0.02)


def test_after_a_rank_is_lost_fewer_go_on_then_more_with_the_same_samples_and_losses(
    zygote: Zygote, tmp_path: Path
) -> None:
    write_corpus(tmp_path)
    write_slow_recipe(tmp_path / "slow.py", steps=STEPS, seconds=0.1)
    run = tmp_path / "run"
    command = ["train", "slow.py:slow", "--run", "run", "--checkpoint.every", "4"]
    command += ["--budget.uneven"]  # three ranks do not share sixteen sequences

    def start(world_size: int) -> list[Process]:
        output = tmp_path / f"{world_size}-ranks"
        return zygote.start_ranks(command, world_size, cwd=tmp_path, output=output)

    # One dies as all are asked to stop: whoever lives must neither wait for it nor call this saved.
    ranks = start(3)
    reached(run, 6, ranks)
    ranks[2].kill()
    for rank in ranks[:2]:
        rank.send(signal.SIGTERM)
    for rank in ranks[:2]:
        assert rank.wait(TIMEOUT) == 1, rank.output()
        assert re.search("rank 2 is gone", rank.output()), rank.output()
    # Two go on from the checkpoint, and are asked to stop in peace, as an agent does when a host
    # comes back.
    ranks = start(2)
    reached(run, 10, ranks)
    ranks[1].send(signal.SIGTERM)
    assert [rank.wait(TIMEOUT) for rank in ranks] == [75, 75], ranks[0].output()
    ranks = start(4)
    assert [rank.wait(TIMEOUT) for rank in ranks] == [0] * 4, ranks[0].output()

    starts = events_of(run, "start")
    assert [event["world_size"] for event in starts] == [3, 2, 4]
    lost, stopped = events_of(run, "stop")[:2]
    assert (lost["exit_code"], stopped["exit_code"]) == (1, 75)
    assert starts[1]["resumed_from"] == lost["step"] // 4 * 4
    assert starts[2]["resumed_from"] == stopped["step"], "a stop in peace loses no step"

    recipe = replace(tiny_recipe(tmp_path, steps=STEPS), seed=3)
    (tmp_path / "alone.toml").write_text(to_toml(recipe))
    alone = ["train", "--from-file", "alone.toml", "--run", "alone"]
    assert zygote.start(alone, cwd=tmp_path).wait(TIMEOUT) == 0
    oracle = {step["step"]: step for step in steps_of(tmp_path / "alone")}
    found = steps_of(run)
    assert {step["step"] for step in found} == set(range(1, STEPS + 1)) == set(oracle)
    for mine in found:
        theirs = oracle[mine["step"]]
        for name in ("samples", "sample_ids", "tokens", "tokens_total", "learning_rate"):
            assert mine[name] == theirs[name], (mine["step"], name)
        for name in ("loss", "gradient_norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=RELATIVE), (mine["step"], name)


DYING = """
import os, signal, sys
from dataclasses import dataclass, replace
from pathlib import Path

from armillary.foundation.component import component
from armillary.foundation.restarts import restart_number
from armillary.recipe import recipe
from armillary.tasks.next_token import NextToken
from armillary.tasks.task import TaskConfig
sys.path.insert(0, {tests!r})
from tiny_runs import tiny_recipe

calls = 0

@component("dies")
@dataclass(frozen=True, kw_only=True, slots=True)
class Dies(TaskConfig):
    def weight(self, batch):
        return NextToken().weight(batch)

    def loss(self, model, batch):
        global calls
        calls += model.training
        if calls == 7 and os.environ["RANK"] == "1" and restart_number() < 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return NextToken().loss(model, batch)

@recipe("dying")
def dying():
    return replace(tiny_recipe(Path.cwd(), steps=24), task=Dies())
"""


TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
STARTERS = {
    "supervisor": (["armillary", "train"], ["--nproc", "2", "--max-restarts", "1"]),
    "torchrun": ([*TORCHRUN, "-m", "--", "armillary", "train"], []),
}
"""What starts ranks, and again after a failure: words before and after those of the run."""


@pytest.mark.full
@pytest.mark.parametrize("starter", STARTERS)
def test_after_a_failure_all_ranks_are_started_again_from_the_newest_checkpoint(
    starter: str, tmp_path: Path
) -> None:
    write_corpus(tmp_path)
    (tmp_path / "dying.py").write_text(DYING.format(tests=str(Path(__file__).parents[1])))
    before, after = STARTERS[starter]
    run = ["dying.py:dying", "--run", "run", "--checkpoint.every", "3"]
    run += ["--checkpoint.asynchronous", "false"]  # so that it is known what is durable
    made = subprocess.run(
        [sys.executable, "-m", *before, *run, *after],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    starts = events_of(tmp_path / "run", "start")
    # The supervisor may do so once in a row: each start made a checkpoint, so none counts.
    assert [event["restart"] for event in starts] == [0, 1, 2]
    assert [event["resumed_from"] for event in starts] == [None, 6, 12]
    assert {step["step"] for step in steps_of(tmp_path / "run")} == set(range(1, 25))
    if starter == "supervisor":
        assert made.stderr.count("rank 1 died of SIGKILL after step") == 2


@pytest.mark.full  # it waits for twenty seconds
def test_who_is_asked_to_stop_does_not_wait_for_one_that_does_not_answer(
    zygote: Zygote, tmp_path: Path
) -> None:
    """A host that is cut off closes no connection; a process that was halted neither."""
    write_corpus(tmp_path)
    write_slow_recipe(tmp_path / "slow.py", steps=1000, seconds=0.05)
    command = ["train", "slow.py:slow", "--run", "run"]
    ranks = zygote.start_ranks(command, 2, cwd=tmp_path, output=tmp_path / "ranks")
    reached(tmp_path / "run", 2, ranks)
    ranks[1].send(signal.SIGSTOP)
    time.sleep(1.0)  # until the other waits for it
    ranks[0].send(signal.SIGTERM)
    assert ranks[0].wait(29.0) == 1, ranks[0].output()  # an agent of torchrun kills after thirty
    assert "rank 1 does not answer" in ranks[0].output()
    assert events_of(tmp_path / "run", "stop")[-1]["exit_code"] == 1


@pytest.mark.full
def test_hosts_under_torchrun_are_lost_and_come_back(tmp_path: Path) -> None:
    outcome = elastic.trial(tmp_path)
    assert outcome.worlds == (4, 2, 4)
    assert outcome.same_samples
    assert outcome.loss_deviation <= RELATIVE
    assert outcome.repeated <= elastic.EVERY


@pytest.mark.full
def test_a_host_whose_cable_is_pulled_is_done_without_until_it_is_back(tmp_path: Path) -> None:
    if reason := network.why_not():
        pytest.skip(reason)
    found = nodes.trial(tmp_path)
    assert found.outcome.worlds == (4, 2, 4)
    assert "ranks 2, 3 do not answer" in found.named
    assert found.outcome.same_samples
    assert found.outcome.loss_deviation <= RELATIVE
