"""Starting again: what a command goes on from, what it needs, and what it leaves as it was."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from armillary.checkpoint.places.local import LocalPlace
from armillary.checkpoint.places.place import Draft
from armillary.foundation.errors import UserError
from armillary.recipe.budget import Sampling
from armillary.recipe.recipe import Recipe
from armillary.resilience.signals import Stopped, StopRequest
from armillary.training import resume
from armillary.training.assembly import assemble
from armillary.training.prepare import BYTES_PER_PARAMETER
from armillary.training.run_folder import default_run_folder
from armillary.training.session import Session
from armillary.training.train import train
from armillary.training.validation import validate
from tiny_runs import events_of, steps_of, tiny_recipe, write_corpus

STEPS = 12


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """Twelve steps, a checkpoint after each fourth, all of them kept."""
    write_corpus(tmp_path)
    return saving(tiny_recipe(tmp_path, steps=STEPS), every=4, keep_last=9)


def saving(recipe: Recipe, **values: int) -> Recipe:
    return replace(recipe, checkpoint=replace(recipe.checkpoint, **values))


def run(recipe: Recipe, folder: Path, resume: str = "auto") -> int:
    return train(recipe, name="tiny", folder=folder, resume=resume)


def stopped_at(step: int, act: Callable[[], int]) -> None:
    """Does `act`, in which a run is asked to stop once it has taken that many steps."""
    original = Session._take

    def stepping(self: Session, *mine: Any) -> None:
        if self.position.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        original(self, *mine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "_take", stepping)
        assert act() == 75


def origins(run: Path) -> list[int | None]:
    """Where each start of a run began."""
    return [event["resumed_from"] for event in events_of(run, "start")]


def names(run: Path) -> list[str]:
    """The run's checkpoints, those set aside without the random part of their names."""
    return sorted(path.name[:23] for path in (run / "checkpoints").iterdir())


def leave_free(monkeypatch: pytest.MonkeyPatch, amount: int) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - amount, amount))


@pytest.mark.parametrize("request_", ["never", "4", "a path"])
def test_the_same_command_goes_on_whatever_past_it_asked_for(
    request_: str, recipe: Recipe, tmp_path: Path
) -> None:
    own, other = tmp_path / "run", tmp_path / "other"
    assert run(recipe, own) == run(recipe, other) == 0
    resume = str(other / "checkpoints" / "step-00000004") if request_ == "a path" else request_
    began = None if request_ == "never" else 4

    stopped_at(6, lambda: run(recipe, own, resume))
    aside = [f"set-aside-step-{step:08d}" for step in (4, 8, 12)]
    kept = ["step-00000004", "step-00000006"]
    if request_ == "4":
        aside = aside[1:]
    elif request_ == "a path":
        kept = kept[1:]  # the other run's stays there, and the old branch is not this one's
    assert names(own) == [*aside, *kept]

    stopped_at(9, lambda: run(recipe, own, resume))
    assert run(recipe, own, resume) == 0
    assert origins(own) == [None, began, 6, 9]
    assert steps_of(own)[:STEPS] == steps_of(other)
    assert {step["step"]: step for step in steps_of(own)} == {
        step["step"]: step for step in steps_of(other)
    }
    told = [event["message"] for event in events_of(own, "message")]
    assert sum("was followed before" in message for message in told) == 2

    # It has finished: asked for again, the other past is followed again.
    stopped_at(6, lambda: run(recipe, own, resume))
    assert origins(own)[-1] == began


def test_a_request_with_another_recipe_is_another_command(recipe: Recipe, tmp_path: Path) -> None:
    stopped_at(6, lambda: run(recipe, tmp_path / "run", "never"))
    changed = replace(recipe, max_gradient_norm=0.5)
    stopped_at(6, lambda: run(changed, tmp_path / "run", "never"))
    assert run(changed, tmp_path / "run", "never") == 0
    assert origins(tmp_path / "run") == [None, None, 6]


def test_a_followed_request_whose_checkpoints_are_damaged_is_followed_again(
    recipe: Recipe, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    stopped_at(6, lambda: run(recipe, folder, "never"))
    for tensors in (folder / "checkpoints").glob("*/*.safetensors"):
        tensors.write_bytes(b"")
    assert run(recipe, folder, "never") == 0
    assert origins(folder) == [None, None]


def test_room_is_asked_for_what_is_not_there_yet_and_before_the_data_is_read(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, copy = tmp_path / "run", BYTES_PER_PARAMETER * recipe.model.parameter_count()
    recipe = saving(recipe, keep_last=2)
    leave_free(monkeypatch, 3 * copy - 1)
    with pytest.raises(UserError, match="this run needs"):
        run(recipe, folder)
    assert not (tmp_path / "cache").exists()
    leave_free(monkeypatch, 3 * copy)
    stopped_at(9, lambda: run(recipe, folder))
    assert len(names(folder)) == 2
    leave_free(monkeypatch, copy - 1)
    with pytest.raises(UserError, match="this run needs"):
        run(recipe, folder)
    leave_free(monkeypatch, copy)
    with pytest.raises(UserError, match="this run needs"):
        run(recipe, folder, "8")
    assert run(recipe, folder) == 0


@pytest.mark.parametrize("ending", ["finished", "stopped"])
def test_a_save_that_failed_is_tried_again_when_the_run_ends(
    ending: str, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, failed = LocalPlace.begin, []

    def fail_once(self: LocalPlace, final: str) -> Draft:
        if final == "step-00000008" and not failed:
            failed.append(final)
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self, final)

    monkeypatch.setattr(LocalPlace, "begin", fail_once)
    folder = tmp_path / "run"
    if ending == "finished":
        assert run(replace(recipe, budget=replace(recipe.budget, steps=8)), folder) == 0
    else:
        stopped_at(8, lambda: run(recipe, folder))
    events = [event for event in events_of(folder, "checkpoint") if event["step"] == 8]
    states = [event["state"] for event in events if event["state"] != "staged"]
    assert states == ["failed", "durable"]
    assert names(folder) == ["step-00000004", "step-00000008"]


def test_a_look_that_a_stop_cut_short_is_made_when_the_run_goes_on(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    asked: list[str] = []
    recipe = replace(recipe, budget=replace(recipe.budget, steps=16))
    assert run(recipe, whole) == 0

    def stop_once(*arguments: Any, **keywords: Any) -> Any:
        if not asked:
            asked.append("once")
            os.kill(os.getpid(), signal.SIGTERM)
        return validate(*arguments, **keywords)

    monkeypatch.setattr("armillary.training.session.validate", stop_once)
    assert run(recipe, broken) == 75
    assert events_of(broken, "validation") == []
    assert run(recipe, broken) == 0
    assert origins(broken) == [None, 7]
    looks = [
        [(event["step"], event["name"], event["loss"]) for event in events_of(each, "validation")]
        for each in (whole, broken)
    ]
    assert [step for step, _, _ in looks[0]] == [7, 14, 16]
    assert looks[0] == looks[1]
    assert steps_of(broken) == steps_of(whole)


def test_a_resumed_run_says_which_values_differ(recipe: Recipe, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stopped_at(4, lambda: run(recipe, folder))
    stopped_at(6, lambda: run(recipe, folder))
    assert events_of(folder, "warning") == []
    longer = replace(recipe, budget=replace(recipe.budget, steps=14), max_gradient_norm=0.5)
    assert run(longer, folder) == 0
    (warning,) = events_of(folder, "warning")
    assert "budget.steps (12 -> 14)" in warning["message"]
    assert "max_gradient_norm (1.0 -> 0.5)" in warning["message"]
    assert (warning["where"], warning["step"]) == ("resume", 6)


def test_a_finished_run_called_again_takes_no_step_and_says_so(
    recipe: Recipe,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "run"
    assert run(recipe, folder) == 0
    log, saved = ((folder / name).read_bytes() for name in ("events.jsonl", "recipe.toml"))
    capsys.readouterr()
    assert run(recipe, folder) == 0
    assert "has finished already at step 12; a longer budget" in capsys.readouterr().err
    assert (folder / "events.jsonl").read_bytes() == log
    with monkeypatch.context() as newer:  # a version with more leaves, which are at their defaults
        newer.setattr(resume, "recipe_sha256", lambda tree: "of other leaves")
        assert run(recipe, folder) == 0
    assert (folder / "events.jsonl").read_bytes() == log

    # Another value may ask for other scores or samples, but the weights are what they were.
    assert run(replace(recipe, max_gradient_norm=0.5), folder) == 0
    told = [event["message"] for event in events_of(folder, "message")]
    assert sum("has finished already" in message for message in told) == 1
    assert len(steps_of(folder)) == STEPS
    assert (folder / "recipe.toml").read_bytes() == saved

    assert run(replace(recipe, budget=replace(recipe.budget, steps=13)), folder) == 0
    assert steps_of(folder)[-1]["step"] == 13
    assert (folder / "recipe.toml").read_bytes() != saved


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("qwen3-0.6b", "qwen3-0.6b"),
        ("recipes/my.own.toml", "my.own"),
        ("there/mine.py:small", "small"),
        ("package.module:small", "small"),
    ],
)
def test_a_run_folder_is_named_after_the_recipe(name: str, short: str) -> None:
    made = default_run_folder(name, Recipe())
    assert (made.parent, made.name[:-9]) == (Path("runs"), short)


def test_a_stop_before_anything_is_started_leaves_the_log_as_it_was(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    assert run(recipe, folder) == 0
    before = (folder / "events.jsonl").read_bytes()
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Stopped, match="SIGTERM"):
            train(recipe, name="tiny", folder=folder, stop=stop)

    def stop_then_assemble(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return assemble(*arguments)

    monkeypatch.setattr("armillary.training.prepare.assemble", stop_then_assemble)
    monkeypatch.setattr("armillary.training.resume.restore", lambda *_: pytest.fail("restored"))
    with pytest.raises(Stopped, match="SIGTERM"):
        run(recipe, folder)
    assert (folder / "events.jsonl").read_bytes() == before


def test_what_breaks_before_the_first_step_is_in_the_log(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(*_: Any) -> None:
        raise MemoryError("too large")

    monkeypatch.setattr("armillary.training.prepare.assemble", break_down)
    with pytest.raises(MemoryError):
        run(recipe, tmp_path / "run")
    error, stop = events_of(tmp_path / "run")
    assert (error["kind"], error["message"]) == ("error", "MemoryError: too large")
    assert (stop["kind"], stop["exit_code"]) == ("stop", 1)


def test_a_complete_run_ends_well_without_what_cannot_be_written_or_compressed(
    recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("armillary.training.closing.MOST_COMPRESSED_BYTES", 1)
    folder = tmp_path / "a run"
    recipe = replace(recipe, sampling=Sampling(prompts=("it", "x" * 80), tokens=8))
    assert run(recipe, folder) == 0
    (warning,) = events_of(folder, "warning")
    assert "beyond the model's context" in warning["message"]
    assert events_of(folder, "sample") == []
    (message,) = events_of(folder, "message")
    assert "the compressors were not asked: " in message["message"]
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"armillary generate '{folder}' --prompt it   |" in shown.err

    recipe = replace(recipe, sampling=Sampling(prompts=("it", "is"), tokens=8))
    assert run(recipe, folder) == 0
    assert [event["prompt"] for event in events_of(folder, "sample")] == ["it", "is"]
