"""An sbatch script under stand-ins for srun and scontrol: exit codes, signals, the queue."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cluster_stubs import Stubs

from armillary.launch.slurm import Slurm

ENDS_IN_TURN = f"""#!{sys.executable} -S
# Ends with the codes of CODES, one after the other, counted on node 0; waits for `wait`.
import os, signal, sys, time
path = os.environ["STUBS"] + "/calls-" + os.environ["SLURM_NODEID"]
with open(path, "a") as file:
    file.write("x")
code = os.environ["CODES"].split()[os.path.getsize(path) - 1]
if code.startswith("wait"):
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(int(code[4:])))
    open(path + ".waits", "w").close()
    time.sleep(30)
sys.exit(int(code))
"""


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    made = Stubs(tmp_path)
    made.add("armillary", ENDS_IN_TURN)
    return made


def script(**more: object) -> str:
    return Slurm(recipe=("debug",), name="tiny", nodes=2, **more).render()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("codes", "code", "starts", "requeued"),
    [
        ("0", 0, 1, []),
        ("75", 75, 1, ["requeue 17"]),
        ("2", 2, 1, []),
        ("1 0", 0, 2, []),
        ("1 137 75", 75, 3, ["requeue 17"]),
        ("1 1 1 1 1", 1, 3, []),
    ],
)
def test_75_goes_back_into_the_queue_and_failures_are_started_again_a_few_times(
    stubs: Stubs, codes: str, code: int, starts: int, requeued: list[str]
) -> None:
    made = stubs.run(script(max_restarts=2), CODES=codes)
    assert (made.returncode, stubs.requeued()) == (code, requeued), made.stderr
    for node in range(2):
        assert (stubs.folder / f"calls-{node}").stat().st_size == starts


def test_a_job_does_not_go_back_into_the_queue_for_ever(stubs: Stubs) -> None:
    made = stubs.run(script(max_requeues=5), CODES="75", SLURM_RESTART_COUNT="5")
    assert (made.returncode, stubs.requeued()) == (75, [])
    assert "not put back after 5 times" in made.stderr


@pytest.mark.parametrize(
    ("number", "waits", "requeued"),
    [
        (signal.SIGUSR1, "wait75", ["requeue 17"]),
        (signal.SIGUSR1, "wait1", []),
        (signal.SIGTERM, "wait75", []),
    ],
)
def test_a_request_to_stop_reaches_every_machine_and_what_is_cancelled_stays_out_of_the_queue(
    stubs: Stubs, number: signal.Signals, waits: str, requeued: list[str]
) -> None:
    batch = subprocess.Popen(
        ["bash", "-c", script()],
        env=stubs.environment(CODES=f"{waits} 0"),
        cwd=stubs.folder,
        stderr=subprocess.DEVNULL,
    )
    _wait_for([stubs.folder / f"calls-{node}.waits" for node in range(2)])
    batch.send_signal(number)
    assert (batch.wait(30), stubs.requeued()) == (int(waits[4:]), requeued)


def _wait_for(files: list[Path], seconds: float = 60) -> None:
    limit = time.monotonic() + seconds
    while not all(file.exists() for file in files):
        assert time.monotonic() < limit, files
        time.sleep(0.02)


def _events(path: Path) -> list[dict[str, Any]]:
    """The whole lines of an event log."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


@pytest.mark.full
def test_a_run_on_two_machines_is_warned_saves_and_goes_on_from_the_queue(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path)
    programs = Path(sys.executable).parent
    stubs.add("armillary", f'#!/bin/bash\nexec {programs}/python -m armillary "$@"\n')
    words = ["debug", "--parallel.device", "cpu", "--checkpoint.asynchronous", "false"]
    job = Slurm(
        recipe=(*words, "--budget.steps", "400"),
        name="tiny",
        nodes=2,
        gpus_per_node=0,
        run=str(tmp_path / "run"),
        port=20_000 + os.getpid() % 20_000,
        max_restarts=0,
    )
    environment = stubs.environment(OMP_NUM_THREADS="1")
    batch = subprocess.Popen(["bash", "-c", job.render()], env=environment, cwd=tmp_path)
    events = tmp_path / "run" / "events.jsonl"
    try:
        _wait_for([events], 120)
        while not any(each["kind"] == "step" for each in _events(events)):
            time.sleep(0.05)
        batch.send_signal(signal.SIGUSR1)
        assert batch.wait(120) == 75
    finally:
        batch.kill()
    assert stubs.requeued() == ["requeue 17"]
    stop = _events(events)[-1]
    assert (stop["kind"], stop["exit_code"]) == ("stop", 75)
    short = (*words, "--budget.steps", str(stop["step"] + 2))
    again = Slurm(recipe=short, name="tiny", nodes=2, gpus_per_node=0, run=job.run, port=job.port)
    made = stubs.run(again.render(), OMP_NUM_THREADS="1", SLURM_RESTART_COUNT="1")
    assert made.returncode == 0, made.stderr
    starts = [each for each in _events(events) if each["kind"] == "start"]
    assert [each["world_size"] for each in starts] == [2, 2]
    assert starts[1]["resumed_from"] == stop["step"]
