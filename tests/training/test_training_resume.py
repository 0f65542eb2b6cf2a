"""A resumed run equals an uninterrupted one to the bit, however it was interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch

from armillary.checkpoint.manifest import read_manifest
from armillary.checkpoint.places.open import open_place
from armillary.foundation.errors import UserError
from armillary.parallel.config import Parallel
from armillary.recipe.recipe import Recipe
from armillary.recipe.toml import to_toml
from armillary.training.session import Session
from armillary.training.train import train
from ranks import run_ranks
from tiny_runs import accumulating, events_of, steps_of, tiny_recipe, write_corpus

STEPS = 90
EVERY = 10
PATIENCE_SECONDS = 120.0


def long_recipe(folder: Path, ranks: int) -> Recipe:
    """Accumulation, with prefetch on, and checkpoints so often that a kill lands between two."""
    parallel = Parallel(device="cpu", dp_shard=ranks)
    recipe = accumulating(tiny_recipe(folder, steps=STEPS, parallel=parallel), 4)
    return replace(recipe, checkpoint=replace(recipe.checkpoint, every=EVERY))


def train_on_each_rank(folder: str, recipe: Recipe) -> None:
    assert train(recipe, name="tiny", folder=Path(folder)) == 0


class Running:
    """A training process of its own, and what its run has logged so far."""

    def __init__(self, recipe: Path, run: Path, *options: str) -> None:
        command = [sys.executable, "-m", "armillary", "train", "--from-file", str(recipe)]
        self.log = run / "events.jsonl"
        self._offset = self.log.stat().st_size if self.log.exists() else 0
        self._output = run.with_suffix(".output")
        with self._output.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, "--run", str(run), *options],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
            )

    def wait_for(self, step: int, **wanted: Any) -> dict[str, Any]:
        """The next event of this kind, of `step` or later; waits for it."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            for event in self._new_events():
                if wanted.items() <= event.items() and event["step"] >= step:
                    return event
            try:
                code = self.process.wait(0.02)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"ended ({code}) before {wanted}: {self._output.read_text()}")
        raise AssertionError(f"no {wanted} of step {step} in {PATIENCE_SECONDS} s")

    def _new_events(self) -> Iterator[dict[str, Any]]:
        if self.log.exists():
            with self.log.open("rb") as file:
                file.seek(self._offset)
                while (line := file.readline()).endswith(b"\n"):
                    self._offset = file.tell()
                    yield json.loads(line)

    def finish(self, code: int) -> None:
        assert self.process.wait(PATIENCE_SECONDS) == code, self._output.read_text()


def state_of(run: Path, step: int, *names: str) -> dict[str, str]:
    """Checksums of the files that hold a checkpoint's tensors, numbers and random states."""
    files = read_manifest(open_place(run / "checkpoints"), f"step-{step:08d}")["files"]
    names = names or ("*.safetensors", "state.json", "rng-*.json")
    return {
        name: entry["sha256"]
        for name, entry in files.items()
        if any(fnmatch(name, pattern) for pattern in names)
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_interrupted_runs_equal_an_uninterrupted_one_bit_for_bit(
    ranks: int, tmp_path: Path
) -> None:
    write_corpus(tmp_path)
    recipe, wanted = tmp_path / "recipe.toml", long_recipe(tmp_path, ranks)
    recipe.write_text(to_toml(wanted))
    options = ("--nproc", str(ranks))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run_ranks(train_on_each_rank, ranks, str(whole), wanted)

    interrupted = Running(recipe, broken, *options)
    interrupted.wait_for(12, kind="step")
    interrupted.process.send_signal(signal.SIGINT)
    interrupted.finish(75)
    stopped_at = steps_of(broken)[-1]["step"]
    assert 12 <= stopped_at < STEPS

    killed = Running(recipe, broken, *options)
    rank_0 = killed.wait_for(0, kind="start")["pid"]
    saved = killed.wait_for(stopped_at + 1, kind="checkpoint", state="durable")["step"]
    killed.wait_for(saved + EVERY // 2, kind="step")
    os.kill(rank_0, signal.SIGKILL)
    killed.finish(-signal.SIGKILL if ranks == 1 else 128 + signal.SIGKILL)
    assert events_of(broken)[-1]["kind"] != "stop"

    Running(recipe, broken, *options).finish(0)

    oracle = {step["step"]: step for step in steps_of(whole)}
    assert sorted(oracle) == list(range(1, STEPS + 1))
    found = steps_of(broken)
    assert {step["step"] for step in found} == set(oracle)
    assert len(found) > STEPS, "the kill cost no step"
    for step in found:  # also those that a kill made the run repeat
        assert step == oracle[step["step"]]
    exact = ("*.safetensors", "*.json")  # tensors, position, and the random states of each rank
    assert state_of(broken, STEPS, *exact) == state_of(whole, STEPS, *exact)
    _, resumed, again = events_of(broken, "start")
    assert resumed["resumed_from"] == stopped_at
    assert again["resumed_from"] >= saved
    assert events_of(whole, "step")[-1]["epoch"] > 2


def stop_after(recipe: Recipe, folder: Path, step: int, resume: str = "auto") -> None:
    """Trains a longer run up to `step`, where it is asked to stop; it saves and ends."""
    original = Session._take

    def stepping(self: Session, *args: Any, **keywords: Any) -> None:
        if self.position.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        original(self, *args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "_take", stepping)
        assert train(recipe, name="tiny", folder=folder, resume=resume) == 75


def resume_around_an_epoch(folder: str, ranks: int) -> None:
    """The test below, as each rank runs it."""
    torch.set_num_threads(1)
    tmp_path = Path(folder)
    parallel = Parallel(device="cpu", dp_shard=ranks)
    recipe = tiny_recipe(tmp_path, steps=12, parallel=parallel)
    assert train(recipe, name="tiny", folder=tmp_path / "whole") == 0
    epochs = [event["epoch"] for event in events_of(tmp_path / "whole", "step")]
    boundary = next(step for step, epoch in enumerate(epochs, 1) if epoch >= 1)
    assert 2 < boundary < 10

    for step in (boundary - 1, boundary, boundary + 1) if ranks == 1 else (boundary,):
        first, again, on = (tmp_path / f"{name}-{step}" for name in ("first", "again", "on"))
        stop_after(recipe, first, step)
        stop_after(recipe, again, step, resume=str(first))
        assert state_of(again, step) == state_of(first, step), "saved anew, not the same"
        assert train(recipe, name="tiny", folder=on, resume=str(again)) == 0
        assert steps_of(on) == steps_of(tmp_path / "whole")[step:]


@pytest.mark.parametrize("ranks", [1, 2])
def test_runs_resumed_around_an_epoch_boundary_go_on_and_save_as_if_uninterrupted(
    ranks: int, tmp_path: Path
) -> None:
    write_corpus(tmp_path, documents=40)
    run_ranks(resume_around_an_epoch, ranks, str(tmp_path), ranks)


def test_other_data_under_a_checkpoint_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    assert train(tiny_recipe(tmp_path, steps=3), name="tiny", folder=tmp_path / "run") == 0
    write_corpus(tmp_path, seed=1)
    before = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    with pytest.raises(UserError, match="was trained on other data"):
        train(tiny_recipe(tmp_path, steps=6), name="tiny", folder=tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == before
