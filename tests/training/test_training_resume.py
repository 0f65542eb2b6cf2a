"""A resumed run equals an uninterrupted one to the bit, however it was interrupted."""

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

from armillary.checkpoint.manifest import read_manifest
from armillary.foundation.errors import UserError
from armillary.recipe.toml import to_toml
from armillary.training.train import train
from tiny_runs import events_of, steps_of, tiny_recipe, write_corpus

STEPS = 90
PATIENCE_SECONDS = 120.0
RECIPE = ("--budget.microbatch-sequences", "4", "--checkpoint.every", "10")
"""Accumulation, with prefetch on, and a checkpoint often enough for a kill to land between two."""


def start(recipe: Path, run: Path, *options: str) -> subprocess.Popen[bytes]:
    """Starts a training process of its own."""
    command = [sys.executable, "-m", "armillary", "train", "--from-file", str(recipe)]
    return subprocess.Popen(
        [*command, "--run", str(run), *RECIPE, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def wait_for(
    process: subprocess.Popen[bytes], run: Path, wanted: dict[str, Any], step: int
) -> None:
    """Returns as soon as the run's log has such an event of `step` or later."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            output = process.stdout.read().decode() if process.stdout else ""
            raise AssertionError(f"the run ended before step {step}: {output}")
        if (run / "events.jsonl").exists():
            lines = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
            events = [json.loads(line) for line in lines if line.endswith(b"\n")]
            if any(wanted.items() <= event.items() and event["step"] >= step for event in events):
                return
    raise AssertionError(f"no {wanted} of step {step} in {PATIENCE_SECONDS} s")


def finish(process: subprocess.Popen[bytes], code: int) -> None:
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == code, output.decode()


def tensors_of(run: Path, step: int) -> dict[str, str]:
    """Checksums of the files that hold a checkpoint's tensors and random states."""
    files = read_manifest(run / "checkpoints" / f"step-{step:08d}")["files"]
    return {
        name: entry["sha256"]
        for name, entry in files.items()
        if name.endswith((".distcp", ".json"))
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_interrupted_runs_equal_an_uninterrupted_one_bit_for_bit(
    ranks: int, tmp_path: Path
) -> None:
    write_corpus(tmp_path)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(tiny_recipe(tmp_path, steps=STEPS)))
    options = () if ranks == 1 else ("--nproc", str(ranks))
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    reference = start(recipe, whole, *options)
    wait_for(reference, whole, {"kind": "step"}, 1)  # the corpus is built: two may start at once

    interrupted = start(recipe, broken, *options)
    wait_for(interrupted, broken, {"kind": "step"}, 12)
    interrupted.send_signal(signal.SIGINT)
    finish(interrupted, 75)
    stopped_at = steps_of(broken)[-1]["step"]
    assert 12 <= stopped_at < STEPS

    killed = start(recipe, broken, *options)
    wait_for(killed, broken, {"kind": "checkpoint", "state": "durable"}, stopped_at + 1)
    wait_for(killed, broken, {"kind": "step"}, stopped_at + 12)
    killed.kill()
    killed.communicate()

    finish(start(recipe, broken, *options), 0)
    finish(reference, 0)

    oracle = {step["step"]: step for step in steps_of(whole)}
    assert sorted(oracle) == list(range(1, STEPS + 1))
    found = steps_of(broken)
    assert {step["step"] for step in found} == set(oracle)
    for step in found:  # also those that a kill made the run repeat
        assert step == oracle[step["step"]]
    assert tensors_of(broken, STEPS) == tensors_of(whole, STEPS)
    _, resumed, again = events_of(broken, "start")
    assert resumed["resumed_from"] == stopped_at
    assert again["resumed_from"] > stopped_at
    # The run went through several epochs, and was interrupted in the middle of one.
    epochs = {event["step"]: event["epoch"] for event in events_of(whole, "step")}
    assert epochs[STEPS] > 2
    assert epochs[stopped_at] % 1 != 0


def test_a_run_resumed_at_an_epoch_boundary_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    whole = tiny_recipe(tmp_path, steps=40)
    assert train(whole, name="tiny", folder=tmp_path / "whole") == 0
    epochs = {event["step"]: event["epoch"] for event in events_of(tmp_path / "whole", "step")}
    boundary = next(
        step for step in epochs if step > 1 and int(epochs[step]) > int(epochs[step - 1])
    )
    assert boundary < 39

    for step in (boundary - 1, boundary, boundary + 1):
        run = tmp_path / f"from-{step}"
        source = tmp_path / "first"
        first = tiny_recipe(tmp_path, steps=40)
        assert _train_until(first, source / str(step), step)
        assert train(first, name="tiny", folder=run, resume=str(source / str(step))) == 0
        assert steps_of(run) == steps_of(tmp_path / "whole")[step:]


def _train_until(recipe: Any, folder: Path, step: int) -> bool:
    """Trains `step` steps of a longer run, with that run's own schedule, through a saved stop."""
    from armillary.training import session

    original = session.Session._step

    def stepping(self: session.Session, *args: Any, **keywords: Any) -> None:
        if self.position.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        original(self, *args, **keywords)

    session.Session._step = stepping  # type: ignore[method-assign]
    try:
        return train(recipe, name="tiny", folder=folder) == 75
    finally:
        session.Session._step = original  # type: ignore[method-assign]


def test_saving_after_a_resume_gives_the_same_checkpoint(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    recipe = tiny_recipe(tmp_path, steps=12)
    assert _train_until(recipe, tmp_path / "once", 6)
    saved = tensors_of(tmp_path / "once", 6)
    again = tmp_path / "again"
    assert _resume_and_stop(recipe, again, tmp_path / "once", 6)
    assert tensors_of(again, 6) == saved


def _resume_and_stop(recipe: Any, folder: Path, source: Path, step: int) -> bool:
    from armillary.training import session

    original = session.Session._step

    def stepping(self: session.Session, *args: Any, **keywords: Any) -> None:
        assert self.position.step == step
        os.kill(os.getpid(), signal.SIGTERM)
        original(self, *args, **keywords)

    session.Session._step = stepping  # type: ignore[method-assign]
    try:
        return train(recipe, name="tiny", folder=folder, resume=str(source)) == 75
    finally:
        session.Session._step = original  # type: ignore[method-assign]


def test_other_data_under_a_checkpoint_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    assert train(tiny_recipe(tmp_path, steps=3), name="tiny", folder=tmp_path / "run") == 0
    write_corpus(tmp_path, seed=1)
    before = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    with pytest.raises(UserError, match="was trained on other data"):
        train(tiny_recipe(tmp_path, steps=6), name="tiny", folder=tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == before
