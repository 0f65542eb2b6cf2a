"""Runs that begin with weights, runs that were imported, and exports made beside training."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from armillary.checkpoint.config import Checkpoint
from armillary.checkpoint.find import find_checkpoint
from armillary.checkpoint.hugging_face.config import Export, Initial
from armillary.checkpoint.hugging_face.exporting import plan_export, write_export
from armillary.checkpoint.hugging_face.families import FAMILIES
from armillary.checkpoint.hugging_face.own import checkpoint_sources
from armillary.checkpoint.hugging_face.source import Tally, read_all
from armillary.checkpoint.hugging_face.table import Rule
from armillary.checkpoint.places.local import LocalPlace
from armillary.foundation.errors import UserError
from armillary.inference.load import load_trained
from armillary.models.tuning.config import LoRA
from armillary.recipe.overrides import Option, apply
from armillary.recipe.problems import problems
from armillary.recipe.recipe import Recipe
from armillary.recipe.toml import read_toml
from armillary.training import exporting
from armillary.training.exporting import plain_sources
from armillary.training.importing import import_run
from armillary.training.train import train
from tiny_runs import events_of, steps_of, tiny_recipe, write_corpus

SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    write_corpus(tmp_path)
    return tiny_recipe(tmp_path, steps=4)


def messages(run: Path, kind: str = "message") -> str:
    return "\n".join(event["message"] for event in events_of(run, kind))


def weights_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    found = find_checkpoint(LocalPlace(run / "checkpoints"), str(step))
    assert found is not None
    return {n: read_all(s) for n, s in checkpoint_sources(found, Tally()).items()}


def exporting_twice(recipe: Recipe) -> Recipe:
    """It exports its steps 2 and 4."""
    export = Export(every=2, dtype="float32")
    return replace(recipe, checkpoint=Checkpoint(every=2), export=export)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that has exported two; nobody changes it."""
    folder = tmp_path_factory.mktemp("trained")
    write_corpus(folder)
    recipe = exporting_twice(tiny_recipe(folder, steps=4))
    assert train(recipe, name="tiny", folder=folder / "run") == 0
    return folder / "run"


def test_exports_are_made_beside_training_and_hold_what_the_checkpoints_hold(
    trained: Path,
) -> None:
    for step in (2, 4):
        folder = trained / "exports" / f"step-{step:08d}"
        ours, theirs = weights_of(trained, step), load_file(folder / SHARD)
        assert torch.equal(theirs["model.norm.weight"], ours["norm.weight"])
        name = "layers.1.attention.output.weight"
        assert torch.equal(theirs["model.layers.1.self_attn.o_proj.weight"], ours[name])
        assert json.loads((folder / "config.json").read_text())["vocab_size"] == 260
        assert (folder / "tokenizer.json").is_file()
    assert not list((trained / "exports").glob(".*"))
    assert f"exported step 4 to {trained / 'exports'}" in messages(trained)


def test_only_the_newest_exports_stay(recipe: Recipe, tmp_path: Path) -> None:
    wanted = Export(every=1, keep_last=1, folder=str(tmp_path / "elsewhere"))
    recipe = replace(recipe, checkpoint=Checkpoint(every=1), export=wanted)
    assert train(recipe, name="tiny", folder=tmp_path / "run") == 0
    assert [p.name for p in (tmp_path / "elsewhere").iterdir()] == ["run"]
    assert [p.name for p in (tmp_path / "elsewhere" / "run").iterdir()] == ["step-00000004"]


def test_an_export_of_a_past_that_was_left_makes_room_for_that_of_the_newer_one(
    recipe: Recipe, tmp_path: Path
) -> None:
    exported, trained = exporting_twice(recipe), tmp_path / "run"
    assert train(exported, name="tiny", folder=trained) == 0
    other = replace(exported, optimizer=replace(exported.optimizer, lr=5e-3))
    before = load_file(trained / "exports/step-00000004" / SHARD)
    assert train(other, name="tiny", folder=trained, resume="2") == 0
    after = load_file(trained / "exports/step-00000004" / SHARD)
    assert torch.equal(after["model.norm.weight"], weights_of(trained, 4)["norm.weight"])
    assert not torch.equal(after["model.norm.weight"], before["model.norm.weight"])
    (older,) = (trained / "exports").glob("older-step-00000004-*")
    kept = load_file(older / SHARD)["model.norm.weight"]
    assert torch.equal(kept, before["model.norm.weight"])
    assert f"an older export is now {older}" in messages(trained)


def test_an_export_that_a_stop_cuts_short_leaves_nothing_and_is_told(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = exporting.write_export

    def stopped(*args: Any, **keywords: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        owner = keywords["advance"].__self__
        assert owner._leave.wait(60)
        return write(*args, **keywords)

    monkeypatch.setattr(exporting, "write_export", stopped)
    recipe = replace(recipe, checkpoint=Checkpoint(every=1, keep_last=4), export=Export(every=2))
    assert train(recipe, name="tiny", folder=tmp_path / "run") == 75
    assert not [*(tmp_path / "run" / "exports").iterdir()]
    assert "step 2 was not exported, as the run was stopped" in messages(tmp_path / "run")


def test_an_export_that_fails_is_a_warning_and_training_goes_on(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **keywords: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "write_export", full)
    recipe = replace(recipe, checkpoint=Checkpoint(every=2), export=Export(every=2))
    assert train(recipe, name="tiny", folder=tmp_path / "run") == 0
    assert len(events_of(tmp_path / "run", "step")) == 4
    told = messages(tmp_path / "run", "warning")
    assert "step 2 was not exported" in told and "No space left" in told


def test_a_run_begins_with_the_weights_of_another_run_or_of_an_export(
    recipe: Recipe, trained: Path, tmp_path: Path
) -> None:
    losses = {}
    for name, address in {
        "run": str(trained),
        "checkpoint": str(trained / "checkpoints" / "step-00000004"),
        "export": str(trained / "exports" / "step-00000004"),
    }.items():
        begun = replace(recipe, initial=Initial(weights=address))
        assert train(begun, name="tiny", folder=tmp_path / name) == 0
        losses[name] = steps_of(tmp_path / name)
        assert losses[name][0]["step"] == 1
        assert f"weights of {address}" in messages(tmp_path / name)
    assert losses["run"] == losses["checkpoint"] == losses["export"]
    assert losses["run"][0]["loss"] < steps_of(trained)[0]["loss"]


def test_weights_that_a_run_begins_with_are_checked_as_an_import_is(
    recipe: Recipe, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = replace(recipe, initial=Initial(weights=str(trained / "exports" / "step-00000004")))
    assert train(begun, name="tiny", folder=tmp_path / "run") == 0
    assert "parts compute what a reference does" in messages(tmp_path / "run")
    family = FAMILIES["llama"]

    def swapped(model: Any, config: Any) -> list[Rule]:
        def name(ours: str) -> str:
            one, other = ("gate", "up") if ".gate." in ours else ("up", "gate")
            return ours.replace(f"feed_forward.{one}.", f"feed_forward.{other}.")

        rules = family.rules(model, config)
        return [replace(rule, ours=tuple(map(name, rule.ours))) for rule in rules]

    monkeypatch.setitem(FAMILIES, "llama", replace(family, rules=swapped))
    with pytest.raises(UserError, match=r"feed_forward\.gate: our result differs"):
        train(begun, name="tiny", folder=tmp_path / "wrong")


def test_an_interrupted_run_goes_on_from_its_checkpoint_and_not_from_its_first_weights(
    recipe: Recipe, trained: Path, tmp_path: Path
) -> None:
    begun = replace(recipe, initial=Initial(weights=str(trained)))
    assert train(begun, name="tiny", folder=tmp_path / "run") == 0
    longer = replace(begun, budget=replace(begun.budget, steps=6))
    assert train(longer, name="tiny", folder=tmp_path / "run") == 0
    assert events_of(tmp_path / "run", "start")[-1]["resumed_from"] == 4
    assert [step["step"] for step in steps_of(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert messages(tmp_path / "run").count(f"weights of {trained}") == 1


def test_an_imported_run_is_trained_on_from_step_0_as_with_initial_weights(
    recipe: Recipe, trained: Path, tmp_path: Path
) -> None:
    export = trained / "exports" / "step-00000004"
    import_run(str(export), tmp_path / "run")
    imported = apply(Recipe(), [read_toml(tmp_path / "run" / "recipe.toml")])
    assert imported.model.vocab_size == recipe.model.vocab_size
    on = replace(recipe, model=replace(imported.model, max_seq_len=64))
    assert train(on, name="tiny", folder=tmp_path / "run") == 0
    begun = replace(on, initial=Initial(weights=str(export)))
    assert train(begun, name="tiny", folder=tmp_path / "begun") == 0
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "begun")
    assert events_of(tmp_path / "run", "start")[0]["resumed_from"] == 0


def test_weights_of_another_model_are_refused_by_name_before_the_folder_is_made(
    recipe: Recipe, trained: Path, tmp_path: Path
) -> None:
    other = replace(
        recipe, model=replace(recipe.model, ffn_dim=48), initial=Initial(weights=str(trained))
    )
    with pytest.raises(UserError, match=r"layers.0.feed_forward.gate.weight \[64, 32\] instead"):
        train(other, name="tiny", folder=tmp_path / "run")
    assert not (tmp_path / "run" / "recipe.toml").exists()


def test_a_low_rank_run_begins_with_plain_weights_and_is_exported_merged(
    recipe: Recipe, trained: Path, tmp_path: Path
) -> None:
    tuned = replace(recipe, tuning=LoRA(rank=2), initial=Initial(weights=str(trained)))
    run = tmp_path / "tuned"
    assert train(tuned, name="tiny", folder=run) == 0
    found = find_checkpoint(LocalPlace(run / "checkpoints"), "auto")
    assert found is not None
    write_export(plan_export(tuned.model, plain_sources(tuned, found)), tmp_path / "out")
    merged = load_trained(run, device=torch.device("cpu"), merge=True).model.state_dict()
    theirs = load_file(tmp_path / "out" / SHARD)
    for name in ("query", "key"):
        ours = merged[f"layers.0.attention.{name}.weight"]
        other = theirs[f"model.layers.0.self_attn.{name[0]}_proj.weight"]
        assert (ours - other).abs().max() <= 1e-6 * ours.abs().max()
        assert not torch.equal(ours, weights_of(trained, 4)[f"layers.0.attention.{name}.weight"])


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("export.every", "3", "export.every = 3 is no multiple"),
        ("export.every", "-1", "export.every = -1"),
        ("export.format", "onnx", "export.format = 'onnx'"),
        ("export.dtype", "int8", "export.dtype = 'int8'"),
        ("export.folder", "here", "export.folder = 'here' is relative"),
    ],
)
def test_values_of_an_export_that_cannot_be_are_refused(
    option: str, value: str, told: str, recipe: Recipe
) -> None:
    recipe = replace(recipe, checkpoint=Checkpoint(every=2))
    found = problems(apply(recipe, [], [Option(option, value)]))
    assert any(told in problem.message for problem in found)
