"""Ranks in processes of their own, started by torchrun and by `--nproc`: one log, one speaker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from armillary.recipe.toml import to_toml
from armillary.telemetry import schema
from tiny_runs import events_of, steps_of, tiny_recipe, write_corpus

TESTS = str(Path(__file__).parents[1])


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([TESTS, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_under_torchrun_one_rank_speaks_and_logs_for_all(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    (tmp_path / "tiny.toml").write_text(to_toml(tiny_recipe(tmp_path, steps=8)))
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--")
    train = ("armillary", "train", "--from-file", "tiny.toml", "--telemetry.console", "plain")
    made = run(tmp_path, *torchrun, *train, "--run", "run")
    assert made.returncode == 0, made.stderr

    events = events_of(tmp_path / "run")
    assert [step["step"] for step in steps_of(tmp_path / "run")] == list(range(1, 9))
    assert {event["rank"] for event in events} == {0}
    (start,) = events_of(tmp_path / "run", "start")
    assert (start["world_size"], start["mesh"]["dp_shard"]) == (2, 2)
    assert (events[-1]["kind"], events[-1]["exit_code"]) == ("stop", 0)
    assert made.stdout == ""
    for once in ("training tiny.toml", "step 8/8", "stop: finished", "learned: ", "next: "):
        assert made.stderr.count(once) == 1, made.stderr

    for event in events:
        kind = event["kind"]
        known = {
            *schema.COMMON,
            *schema.REQUIRED[kind],
            *schema.OPTIONAL.get(kind, ()),
            "nonfinite",
        }
        assert event.keys() <= known, f"undocumented fields of {kind}: {event.keys() - known}"


FAILING = """
import os
from dataclasses import dataclass, replace
from pathlib import Path

from armillary.foundation.component import component
from armillary.recipe import recipe
from armillary.tasks.next_token import NextToken
from armillary.tasks.task import TaskConfig
from tiny_runs import tiny_recipe

calls = 0

@component("fails-on-rank-1")
@dataclass(frozen=True, kw_only=True, slots=True)
class Fails(TaskConfig):
    def weight(self, batch):
        return NextToken().weight(batch)

    def loss(self, model, batch):
        global calls
        calls += 1
        if calls == 3 and os.environ["RANK"] == "1":
            raise RuntimeError("the ring jams")
        return NextToken().loss(model, batch)

@recipe("failing")
def failing():
    return replace(tiny_recipe(Path.cwd(), steps=8), task=Fails())
"""


def test_a_rank_that_fails_mid_run_ends_all_and_its_reason_is_told_once(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    (tmp_path / "failing.py").write_text(FAILING)
    made = run(tmp_path, "armillary", "train", "failing.py:failing", "--run", "run", "--nproc", "2")
    assert made.returncode == 1
    lines = made.stderr.splitlines()
    assert lines[0] == "error: rank 1 failed with exit code 1"
    assert lines[1].startswith("error: unexpected RuntimeError: the ring jams (")
    assert len(lines) == 3, made.stderr  # and where to see more
    assert [step["step"] for step in steps_of(tmp_path / "run")] == [1, 2]
