"""A rank that is lost: the others end by themselves, and say which one it was."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from armillary.foundation.errors import RunError
from armillary.parallel.config import Parallel
from armillary.recipe.toml import to_toml
from armillary.resilience.roll_call import RollCall
from armillary.training.train import train
from tiny_runs import events_of, tiny_recipe, write_corpus

BEGINNING = (
    "train.Mesh.create",
    "prepare.open_data",
    "prepare.assemble",
    "train.Session",
    "train.close_run",
)
"""What all ranks do together, from the first to the last."""
TIMEOUT = 60
"""Seconds in which all others must have ended; the process group's own timeout is ten minutes."""


def start(folder: Path, rank: int, world_size: int, port: int) -> subprocess.Popen[str]:
    """A rank without a launcher that would end the others in its place."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
    }
    command = ("train", "--from-file", "tiny.toml", "--run", "run")
    return subprocess.Popen(
        [sys.executable, "-m", "armillary", *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("victim", "mesh"),
    [
        (2, Parallel(device="cpu", dp_shard=2, tp=2)),
        (0, Parallel(device="cpu", pp=2, dp_shard=1)),
    ],
    ids=["rank-2-of-tp2-fsdp2", "rank-0-of-pp2"],
)
def test_the_others_end_and_name_one_that_is_killed_in_mid_step(
    victim: int, mesh: Parallel, tmp_path: Path
) -> None:
    write_corpus(tmp_path)
    recipe = tiny_recipe(tmp_path, steps=100_000, parallel=mesh)
    recipe = replace(recipe, budget=replace(recipe.budget, microbatch_sequences=4))
    (tmp_path / "tiny.toml").write_text(to_toml(recipe))
    world_size = mesh.grid.world_size
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = [start(tmp_path, rank, world_size, port) for rank in range(world_size)]
    try:
        deadline = time.monotonic() + TIMEOUT
        log = tmp_path / "run" / "events.jsonl"
        while not (log.exists() and events_of(tmp_path / "run", "step")):
            assert time.monotonic() < deadline, "no step was taken"
            time.sleep(0.05)
        ranks[victim].send_signal(signal.SIGKILL)
        said = {}
        for rank, process in enumerate(ranks):
            said[rank] = process.communicate(timeout=TIMEOUT)[1]
        for rank, process in enumerate(ranks):
            expected = -signal.SIGKILL if rank == victim else 1
            assert process.returncode == expected, said[rank]
            if rank != victim:
                assert re.search(rf"rank {victim} is gone", said[rank]), said[rank]
                assert "Traceback" not in said[rank]
    finally:
        for process in ranks:
            process.kill()
            process.wait()


class Silent:
    """A store at which no rank leaves a sign of life."""

    def add(self, key: str, amount: int, /) -> int:
        return 1

    def set(self, key: str, value: str, /) -> None:
        pass

    def get(self, key: str, /) -> bytes:
        return b""

    def check(self, keys: list[str], /) -> bool:
        return False


@pytest.mark.parametrize("where", BEGINNING)
def test_one_that_is_lost_before_or_after_the_steps_is_named_too(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:29500")

    call = RollCall(Silent(), rank=0, world_size=2, period=1e-3)
    monkeypatch.setattr("armillary.training.train.RollCall", lambda *_, **__: call)
    monkeypatch.setattr(f"armillary.training.{where}", broken)
    write_corpus(tmp_path)
    with pytest.raises(RunError, match=r"rank 1 is gone.*closed by peer") as raised:
        train(tiny_recipe(tmp_path, steps=4), name="tiny", folder=tmp_path / "run")
    assert not raised.value.seen_by_every_rank  # rank 0 may be the one that cannot tell
    if where != "train.Mesh.create":  # the log is opened after it
        (error,) = events_of(tmp_path / "run", "error")
        assert error["message"].startswith("rank 1 is gone")
