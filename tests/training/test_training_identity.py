"""Whose checkpoints those in a folder are, and what a run does when its own have vanished."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from armillary.checkpoint.config import Checkpoint
from armillary.checkpoint.manifest import read_manifest
from armillary.checkpoint.places.local import LocalPlace
from armillary.foundation.errors import UserError
from armillary.recipe.recipe import Recipe
from armillary.training.train import train
from tiny_runs import events_of, steps_of, tiny_recipe, write_corpus


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """Four steps, a checkpoint after each second, outside of the run folder."""
    write_corpus(tmp_path)
    elsewhere = Checkpoint(every=2, folder=str(tmp_path / "elsewhere"))
    return replace(tiny_recipe(tmp_path, steps=4), checkpoint=elsewhere)


def run(recipe: Recipe, folder: Path, resume: str = "auto") -> int:
    return train(recipe, name="tiny", folder=folder, resume=resume)


def saved(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.glob("step-*/*"))


def run_of(recipe: Recipe, step: int) -> str | None:
    place = LocalPlace(Path(recipe.checkpoint.folder))
    return read_manifest(place, f"step-{step:08d}").get("run")


@pytest.mark.parametrize("resume", ["auto", "2", "never", "a path"])
def test_a_folder_with_checkpoints_of_another_run_is_refused_and_left_as_it_was(
    resume: str, recipe: Recipe, tmp_path: Path
) -> None:
    elsewhere, second = tmp_path / "elsewhere", tmp_path / "second"
    assert run(recipe, tmp_path / "first") == 0
    before = saved(elsewhere)
    if resume == "a path":
        resume = str(elsewhere / "step-00000002")
    other = replace(recipe, max_gradient_norm=0.5, budget=replace(recipe.budget, steps=6))
    with pytest.raises(UserError, match=r"another run: step 4 of .* is of run first-.*"):
        run(other, second, resume)
    assert saved(elsewhere) == before
    assert not (second / "events.jsonl").exists()

    own = replace(other, checkpoint=Checkpoint(folder=str(tmp_path / "own")))
    assert run(own, second, str(elsewhere / "step-00000002")) == 0
    assert saved(elsewhere) == before
    assert run(replace(other, checkpoint=recipe.checkpoint), tmp_path / "first") == 0
    assert run_of(recipe, 4) == run_of(recipe, 6)


def test_the_same_command_goes_on_where_the_run_folder_was_lost_or_moved(
    recipe: Recipe, tmp_path: Path
) -> None:
    assert run(recipe, tmp_path / "run") == 0
    run_id = run_of(recipe, 4)
    shutil.rmtree(tmp_path / "run")
    assert run(recipe, tmp_path / "run") == 0
    (tmp_path / "run").rename(tmp_path / "moved")
    assert json.loads((tmp_path / "moved" / "run.json").read_text()) == {"run": run_id}
    assert run(replace(recipe, budget=replace(recipe.budget, steps=6)), tmp_path / "moved") == 0
    assert [step["step"] for step in steps_of(tmp_path / "moved")] == [5, 6]
    assert run_of(recipe, 6) == run_id


def test_a_run_folder_without_an_id_gets_one_and_takes_manifests_without_as_its_own(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr("armillary.training.identity.identify", lambda *_, **__: None)
        older.setattr("armillary.training.identity.remember", lambda *_: None)
        assert run(recipe, tmp_path / "run") == 0
    assert run_of(recipe, 4) is None
    assert run(replace(recipe, budget=replace(recipe.budget, steps=6)), tmp_path / "run") == 0
    assert (run_of(recipe, 6) or "").startswith("run-")


@pytest.mark.parametrize("how", ["folder gone", "folder renamed", "recipe names another"])
def test_a_run_whose_checkpoints_vanished_does_not_silently_begin_again(
    how: str, recipe: Recipe, tmp_path: Path
) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    assert run(recipe, folder) == 0
    longer = replace(recipe, budget=replace(recipe.budget, steps=6))
    assert run(longer, folder) == 0
    log = (folder / "events.jsonl").read_bytes()
    if how == "folder gone":
        shutil.rmtree(elsewhere)
    elif how == "folder renamed":
        elsewhere.rename(tmp_path / "new")
    else:
        longer = replace(longer, checkpoint=Checkpoint(folder=str(tmp_path / "other")))
    with pytest.raises(UserError, match=r"tells of a checkpoint of step 6 at .*step-00000006"):
        run(longer, folder)
    assert (folder / "events.jsonl").read_bytes() == log

    if how == "folder renamed":
        there = replace(longer, checkpoint=Checkpoint(folder=str(tmp_path / "new")))
        assert run(there, folder) == 0
        assert [step["step"] for step in steps_of(folder)] == list(range(1, 7))
    elif how == "folder gone":
        assert run(longer, folder, "never") == 0
        assert [start["resumed_from"] for start in events_of(folder, "start")] == [None, 4, None]
    else:
        (folder / "events.jsonl").write_bytes(b"{\n" + log)
        assert run(longer, folder) == 0  # a damaged log proves nothing
