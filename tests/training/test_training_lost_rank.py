"""A rank that is lost: the others end by themselves, and say which one it was."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from armillary.foundation.errors import RunError
from armillary.parallel.config import Parallel
from armillary.recipe.toml import to_toml
from armillary.resilience.roll_call import RollCall
from armillary.training.train import train
from reliability.zygote import Zygote
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


@pytest.mark.parametrize(
    ("victim", "mesh"),
    [
        (2, Parallel(device="cpu", dp_shard=2, tp=2)),
        (0, Parallel(device="cpu", pp=2, dp_shard=1)),
    ],
    ids=["rank-2-of-tp2-fsdp2", "rank-0-of-pp2"],
)
def test_the_others_end_and_name_one_that_is_killed_in_mid_step(
    victim: int, mesh: Parallel, zygote: Zygote, tmp_path: Path
) -> None:
    write_corpus(tmp_path)
    recipe = tiny_recipe(tmp_path, steps=100_000, parallel=mesh)
    recipe = replace(recipe, budget=replace(recipe.budget, microbatch_sequences=4))
    (tmp_path / "tiny.toml").write_text(to_toml(recipe))
    command = ["train", "--from-file", "tiny.toml", "--run", "run"]
    # Without a launcher, which would end the others in its place.
    size = mesh.grid.world_size
    ranks = zygote.start_ranks(command, size, cwd=tmp_path, output=tmp_path / "said")
    log = tmp_path / "run" / "events.jsonl"
    deadline = time.monotonic() + TIMEOUT
    while not (log.exists() and events_of(tmp_path / "run", "step")):
        assert time.monotonic() < deadline, "no step was taken"
        time.sleep(0.05)
    ranks[victim].kill()
    for process in ranks:
        if process is not ranks[victim]:
            assert process.wait(TIMEOUT) == 1, process.output()
            assert f"rank {victim} is gone" in process.output()
            assert "Traceback" not in process.output()


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
