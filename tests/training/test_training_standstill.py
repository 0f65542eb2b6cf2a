"""A rank that goes nowhere: every rank ends, names it, and leaves its stacks on disk."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from armillary.checkpoint.config import Checkpoint
from armillary.cli.main import main
from armillary.recipe.recipe import Recipe
from armillary.recipe.toml import to_toml
from armillary.resilience.watchdog_config import Watchdog
from reliability.slow_phase import VARIABLE
from reliability.zygote import Process, Zygote
from tiny_runs import events_of, tiny_recipe, write_corpus

PRELUDE = Path(__file__).parents[1] / "reliability" / "slow_phase.py"
WATCHED = Watchdog(step_seconds=3, grace_seconds=1, first_step_seconds=60, ranks_every=10)
FOR_EVER = 600
TIMEOUT = 60
"""Seconds for the whole of a run that comes to a standstill after some steps."""


@dataclass(frozen=True)
class Stuck:
    """Where a rank stops for ever, and how it is told."""

    place: str
    call: int
    words: str
    """In the error of every rank, about the one that is stuck."""
    stack: str
    """In its file."""
    asynchronous: bool = True


WRITE = "armillary.checkpoint.places.local:LocalPlace.write"
STUCK = {
    "data": Stuck("armillary.tasks.next_token:NextToken.weights", 6, "data (5 steps", "feed.py"),
    "before a collective": Stuck(
        "armillary.parallel.mesh:Mesh.sum_over", 4, "forward_backward (", "step.py"
    ),
    "a save": Stuck(WRITE, 2, "saving step 3 (3 steps", "writing.py", asynchronous=False),
    "a save in the background": Stuck(WRITE, 2, "checkpoint-3 stands still", "writing.py"),
}


def start(
    zygote: Zygote,
    folder: Path,
    ranks: int,
    *,
    stuck: Stuck | None = None,
    prelude: Path = PRELUDE,
    steps: int = 100_000,
    every: int = 3,
    variables: Mapping[str, str] | None = None,
) -> list[Process]:
    write_corpus(folder)
    recipe = replace(
        tiny_recipe(folder, steps=steps),
        watchdog=WATCHED,
        checkpoint=Checkpoint(every=every, asynchronous=stuck is None or stuck.asynchronous),
    )
    if ranks == 3:
        recipe = _for_three(recipe)
    (folder / "tiny.toml").write_text(to_toml(recipe))
    variables = dict(variables or {})
    if stuck is not None:
        slow = {"place": stuck.place, "call": stuck.call, "seconds": FOR_EVER, "ranks": [1]}
        variables[VARIABLE] = json.dumps({**slow, "mark": str(folder / "reached")})
    command = ["train", "--from-file", "tiny.toml", "--run", "run"]
    output = folder / "output"
    return zygote.start_ranks(command, ranks, variables, cwd=folder, output=output, prelude=prelude)


def _for_three(recipe: Recipe) -> Recipe:
    return replace(recipe, budget=replace(recipe.budget, batch_tokens=384))


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("where", "ranks"),
    [("data", 2), ("before a collective", 3), ("a save", 2), ("a save in the background", 3)],
)
def test_a_rank_that_sleeps_is_named_with_its_stack_on_every_rank(
    where: str, ranks: int, zygote: Zygote, tmp_path: Path
) -> None:
    stuck = STUCK[where]
    processes = start(zygote, tmp_path, ranks, stuck=stuck)
    for process in processes:
        assert process.wait(TIMEOUT) == 1, process.output()
    said = processes[0].output()  # one rank of a machine speaks for what all see
    assert "rank 1 (" in said and stuck.words in said, said
    assert "Traceback" not in said, said
    hang = tmp_path / "run" / "hang"
    for rank in range(ranks):
        written = (hang / f"rank-{rank:05}.txt").read_text()
        assert f"verdict: {verdict_of(said)}" in written
        assert ("waits for other ranks in: no collective" in written) == (rank == 1), written
    assert stuck.stack in (hang / "rank-00001.txt").read_text()
    assert "slow_phase.py" in (hang / "rank-00001.txt").read_text()
    assert not list(hang.glob("*native*"))
    (error,) = events_of(tmp_path / "run", "error")
    assert error["rank"] == 0 and "rank 1 (" in error["message"]
    assert events_of(tmp_path / "run", "stop")[-1]["exit_code"] == 1


def verdict_of(said: str) -> str:
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    return line.removeprefix("error: ")


HOLDS_THE_INTERPRETER = """
import ctypes, os
from armillary.parallel.mesh import Mesh
sum_over, calls = Mesh.sum_over, 0

def native(*args, **keywords):
    global calls
    calls += 1
    if calls == 4 and os.environ["RANK"] == "1":
        ctypes.PyDLL(None).sleep(600)
    return sum_over(*args, **keywords)

Mesh.sum_over = native
"""


def test_a_rank_in_native_code_that_keeps_python_from_running_is_named_with_its_stack(
    zygote: Zygote, tmp_path: Path
) -> None:
    prelude = tmp_path / "prelude.py"
    prelude.write_text(HOLDS_THE_INTERPRETER)
    waiting, stuck = start(zygote, tmp_path, 2, prelude=prelude)
    assert waiting.wait(TIMEOUT) == 1, waiting.output()
    assert stuck.poll() is None
    stuck.kill()  # as a launcher does
    said = waiting.output()
    assert "rank 1 does not answer, stuck in native code" in said, said
    assert "prelude.py:10 native" in said
    assert "rank 0 waits in" in said


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_was_stopped_is_named_also_when_it_holds_the_meeting_point(
    victim: int, zygote: Zygote, tmp_path: Path
) -> None:
    ranks = start(zygote, tmp_path, 2)
    log = tmp_path / "run" / "events.jsonl"
    wait_for(lambda: log.exists() and events_of(tmp_path / "run", "step"), "no step was taken")
    ranks[victim].send(signal.SIGSTOP)
    other = ranks[1 - victim]
    assert other.wait(TIMEOUT) == 1, other.output()
    ranks[victim].kill()
    written = (tmp_path / "run" / "hang" / f"rank-{1 - victim:05}.txt").read_text()
    assert f"rank {victim} does not answer: gone, stopped" in written
    (error,) = events_of(tmp_path / "run", "error")
    assert error["rank"] == 1 - victim and f"rank {victim} does not answer" in error["message"]


@pytest.mark.full
def test_a_process_that_was_stopped_and_goes_on_is_not_taken_for_one_that_stands_still(
    zygote: Zygote, tmp_path: Path
) -> None:
    (alone,) = start(zygote, tmp_path, 1)
    log = tmp_path / "run" / "events.jsonl"
    wait_for(lambda: log.exists() and events_of(tmp_path / "run", "step"), "no step was taken")
    alone.send(signal.SIGSTOP)
    time.sleep(WATCHED.step_seconds + 1)
    alone.send(signal.SIGCONT)
    before = len(events_of(tmp_path / "run", "step"))
    wait_for(lambda: len(events_of(tmp_path / "run", "step")) > before + 20, "it went no further")
    alone.send(signal.SIGTERM)
    assert alone.wait(TIMEOUT) == 75, alone.output()
    assert not (tmp_path / "run" / "hang").exists()


def test_a_slow_rank_is_told_in_the_log_and_by_runs_show(
    zygote: Zygote, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = {"place": "armillary.parallel.mesh:Mesh.sum_over", "call": 1, "seconds": 0.2}
    variables = {VARIABLE: json.dumps({**slow, "ranks": [1], "mark": str(tmp_path / "reached")})}
    ranks = start(zygote, tmp_path, 2, steps=21, every=0, variables=variables)
    for process in ranks:
        assert process.wait(TIMEOUT) == 0, process.output()
    run = tmp_path / "run"
    first, second = events_of(run, "ranks")
    assert (first["steps"], second["steps"]) == (9, 10)  # the first step tells nothing of a rank
    for event in (first, second):
        assert event["slowest"] == 1 and event["slowest_over_median"] > 1.1
        assert event["busy_seconds"]["max"] <= event["step_seconds"]["max"]
        assert event["garbage_seconds"]["min"] >= 0
    assert main(["runs", "show", str(run)]) == 0
    assert "slowest is rank 1" in capsys.readouterr().out
