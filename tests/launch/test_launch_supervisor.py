"""Ranks that are started again after a failure, as tiny scripts that load no torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from armillary.cli.main import main
from armillary.launch.supervisor import Attempt, end_of_lines, read_attempt, supervise

PYTHON = (sys.executable, "-S", "-c")
PRELUDE = """
import json, os, signal, sys, time
rank, restart = int(os.environ["RANK"]), int(os.environ["ARMILLARY_RESTART"])
def event(kind, step, **fields):
    if rank == 0:
        with open("events.jsonl", "a") as log:
            log.write(json.dumps({"kind": kind, "step": step, **fields}) + "\\n")
def die(): os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def _in_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(script: str, max_restarts: int, nproc: int = 1) -> int:
    return supervise(
        [PRELUDE + script],
        nproc,
        Path.cwd(),
        max_restarts=max_restarts,
        program=PYTHON,
        grace_seconds=0.3,
        pause_seconds=0.01,
    )


def starts() -> list[int]:
    """The number of each start that came as far as its `start` event."""
    lines = Path("events.jsonl").read_text().splitlines()
    return [event["restart"] for event in map(json.loads, lines) if event["kind"] == "start"]


def test_all_ranks_are_started_again_after_one_has_died_and_told_which_time_it_is(
    capfd: pytest.CaptureFixture[str],
) -> None:
    script = """
event("start", 4 * restart, restart=restart)
event("step", 4 * restart + 1)
if restart < 2 and rank == 1: die()
if restart < 2: time.sleep(60)
"""
    assert run(script, max_restarts=2, nproc=2) == 0
    assert starts() == [0, 1, 2]
    told = [line for line in capfd.readouterr().err.splitlines() if "restart " in line]
    assert told == [
        "rank 1 died of SIGKILL after step 1; restart 1 of 2 from the newest checkpoint, in 0.01 s",
        "rank 1 died of SIGKILL after step 5; restart 2 of 2 from the newest checkpoint, in 0.02 s",
    ]


@pytest.mark.parametrize("code", [0, 2, 75, 130])
def test_a_run_that_finished_was_refused_or_was_stopped_is_not_started_again(code: int) -> None:
    script = f"event('start', 0, restart=restart); sys.exit({code})"
    assert run(script, max_restarts=5) == code
    assert starts() == [0]


def test_failures_in_a_row_are_counted_from_the_newest_checkpoint_on(
    capfd: pytest.CaptureFixture[str],
) -> None:
    script = """
event("start", 0, restart=restart)
event("step", 10 + restart)
if restart % 3 == 1: event("checkpoint", 10 + restart, state="durable")
if restart == 7: sys.exit(0)
sys.exit(1)
"""
    assert run(script, max_restarts=3) == 0
    assert starts() == list(range(8))
    Path("events.jsonl").unlink()
    assert run(script, max_restarts=2) == 1
    assert starts() == [0, 1, 2, 3], "the checkpoint of the second start begins a row of three"
    assert capfd.readouterr().err.splitlines()[-1] == (
        "error: the run failed 3 times in a row without a new checkpoint, at last after step 13: "
        "rank 0 failed with exit code 1"
    )


def test_a_crash_loop_ends_early_and_names_the_step_and_the_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    script = """
event("start", 4, restart=restart)
event("step", 6)
event("error", 6, message="the ring jams")
sys.exit(1)
"""
    assert run(script, max_restarts=50) == 1
    assert starts() == [0, 1, 2]
    assert capfd.readouterr().err.splitlines()[-1] == (
        "error: the run failed 3 times in a row after step 6, each time alike: the ring jams"
    )


def test_a_run_that_cannot_begin_is_tried_as_often_as_was_asked_for(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run("sys.exit('error: no such disk' if restart < 4 else 0)", max_restarts=4) == 0
    assert "rank 0 failed with exit code 1 before its first step; restart 4 of 4" in (
        capfd.readouterr().err
    )


STOPPED = """
import sys
from pathlib import Path
from armillary.cli.main import main
from armillary.launch.supervisor import supervise
assert "torch" not in sys.modules
program = (sys.executable, "-S", "-c")
code = supervise([sys.argv[1]], 1, Path("."), max_restarts=9, program=program, pause_seconds=60.0)
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("script", "code", "number"),
    [
        ("print('ready', flush=True); sys.exit(1)", 75, signal.SIGTERM),
        ("print('ready', flush=True); time.sleep(60)", 128 + 15, signal.SIGTERM),
        ("print('ready', flush=True); time.sleep(60)", 128 + 10, signal.SIGUSR1),
    ],
    ids=["in the pause", "in a run that dies of it", "by a scheduler"],
)
def test_who_asks_to_stop_is_not_answered_with_a_restart(
    script: str, code: int, number: signal.Signals
) -> None:
    command = [sys.executable, "-c", STOPPED, PRELUDE + script]
    supervisor = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stderr is not None
        assert supervisor.stdout.readline() == "ready\n"
        if code == 75:
            while "in 60 s" not in supervisor.stderr.readline():
                assert supervisor.poll() is None
        supervisor.send_signal(number)
        assert supervisor.wait(30) == code


def test_an_attempt_is_read_from_where_it_began_torn_lines_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert read_attempt(log, 0) == Attempt()
    assert end_of_lines(log) == 0
    whole = b'{"kind": "step", "step": 7}\n{"kind": "checkpoint", "state": "durable"}\n'
    log.write_bytes(whole + b'{"kind": "st')  # killed
    assert read_attempt(log, 0) == Attempt(step=7, saved=True)
    before = end_of_lines(log)
    assert before == len(whole)
    assert read_attempt(log, before) == Attempt()
    os.truncate(log, before)
    with log.open("ab") as file:
        file.write(b'{"kind": "start", "step": 4}\n[1]\n{"kind": "step", "step": "x"}\n{"kin')
    assert read_attempt(log, before) == Attempt(began=True)
    log.write_bytes(b"")
    assert end_of_lines(log) == 0


@pytest.mark.parametrize(
    ("wanted", "environment", "told"),
    [
        ("-1", {}, "--max-restarts -1"),
        ("2", {"RANK": "0", "WORLD_SIZE": "1"}, "try: torchrun --max-restarts 2"),
    ],
    ids=["below 0", "another's ranks"],
)
def test_restarts_that_cannot_be_had_are_refused(
    wanted: str,
    environment: dict[str, str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "debug", f"--max-restarts={wanted}"]) == 2
    assert told in capsys.readouterr().err
