"""Whole runs that train a part of a model: what they save, resume and report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from armillary.checkpoint.find import find_checkpoint
from armillary.checkpoint.places.open import open_place
from armillary.checkpoint.tensors import stored_tensors
from armillary.foundation.errors import UserError
from armillary.inference.load import load_trained
from armillary.models.layers.low_rank import is_factor
from armillary.models.tuning.config import Full, LoRA, TuningConfig
from armillary.parallel.config import Parallel
from armillary.parallel.materialise import materialise
from armillary.recipe.build import build_model
from armillary.recipe.recipe import Recipe
from armillary.training.train import train
from model_cases import random_tokens, relative_difference
from ranks import run_ranks
from tiny_runs import accumulating, events_of, steps_of, tiny_recipe, write_corpus

STEPS, HALF = 6, 3
LORA = LoRA(rank=2, alpha=4, trained=("*norm.weight",))


def tuned(folder: Path, tuning: TuningConfig, parallel: Parallel | None = None) -> Recipe:
    """The recipe of a short run that saves half-way."""
    recipe = tiny_recipe(folder, steps=STEPS, parallel=parallel)
    recipe = replace(recipe, tuning=tuning, checkpoint=replace(recipe.checkpoint, every=HALF))
    return accumulating(recipe, 4)


def stored(run: Path, step: int) -> set[str]:
    """Names of the tensors in a run's checkpoint."""
    found = find_checkpoint(open_place(run / "checkpoints"), str(step))
    assert found is not None
    return set(stored_tensors(found.place, found.folder))


def train_and_resume(folder: str, tuning: TuningConfig, parallel: Parallel | None) -> None:
    """A run, and one that begins at its middle; as each rank runs it."""
    torch.set_num_threads(1)
    path = Path(folder)
    recipe = tuned(path, tuning, parallel)
    assert train(recipe, name="tiny", folder=path / "whole") == 0
    middle = path / "whole" / "checkpoints" / f"step-{HALF:08d}"
    assert train(recipe, name="tiny", folder=path / "resumed", resume=str(middle)) == 0


def assert_resumed_exactly(folder: Path) -> None:
    """The second half of the whole run is what the resumed one did, to the bit."""
    assert steps_of(folder / "resumed") == steps_of(folder / "whole")[HALF:]
    ends = [folder / run / "checkpoints" / f"step-{STEPS:08d}" for run in ("whole", "resumed")]
    whole, resumed = (
        {file.name: file.read_bytes() for file in end.glob("**/*.safetensors")} for end in ends
    )
    assert whole and whole == resumed


def test_a_low_rank_run_saves_moments_of_what_it_trains_and_resumes_exactly(
    tmp_path: Path,
) -> None:
    write_corpus(tmp_path)
    train_and_resume(str(tmp_path), LORA, None)
    assert_resumed_exactly(tmp_path)
    recipe, run = tuned(tmp_path, LORA), tmp_path / "whole"

    names = stored(run, STEPS)
    weights = {name.removeprefix("model.") for name in names if name.startswith("model.")}
    trained = {name for name in weights if is_factor(name) or name.endswith("norm.weight")}
    moments = {name.split(".", 1)[1].rpartition(".")[0] for name in names if "optimizer." in name}
    assert moments == trained < weights

    with torch.device("meta"):
        first = build_model(recipe)
    materialise(first, torch.device("cpu"), recipe.seed)
    loaded = load_trained(run, device=torch.device("cpu"))
    began = dict(first.named_parameters())
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, began[name]) == (name not in trained), name

    (start,) = events_of(run, "start")
    assert start["trained_parameters"] == sum(began[name].numel() for name in trained)
    assert start["parameters"] == recipe.model.parameter_count()
    assert start["flops_per_token"] < recipe.model.flops_per_token(32, causal=True)


def test_a_loaded_model_can_be_merged(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    recipe = tuned(tmp_path, LORA)
    assert train(recipe, name="tiny", folder=tmp_path / "run") == 0
    tokens = random_tokens(2, 9)
    asis, merged = (
        load_trained(tmp_path / "run", device=torch.device("cpu"), merge=merge).model
        for merge in (False, True)
    )
    assert any(is_factor(name) for name in asis.state_dict())
    assert merged.state_dict().keys() == recipe.model.build().state_dict().keys()
    assert relative_difference(merged(tokens), asis(tokens)) <= 1e-6


@pytest.mark.parametrize(
    ("tuning", "parallel"),
    [
        pytest.param(
            Full(frozen=("embedding.weight", "layers.0.*")),
            Parallel(pp=2, device="cpu"),
            marks=pytest.mark.full,
        ),
        pytest.param(LORA, Parallel(tp=2, device="cpu"), marks=pytest.mark.full),
    ],
    ids=("a stage that trains nothing", "factors cut over tp"),
)
def test_tuned_runs_resume_exactly_on_2_ranks(
    tuning: TuningConfig, parallel: Parallel, tmp_path: Path
) -> None:
    write_corpus(tmp_path)
    run_ranks(train_and_resume, 2, str(tmp_path), tuning, parallel)
    assert_resumed_exactly(tmp_path)
    # And one process goes on from what two ranks saved.
    middle = tmp_path / "whole" / "checkpoints" / f"step-{HALF:08d}"
    alone = tuned(tmp_path, tuning)
    assert train(alone, name="tiny", folder=tmp_path / "alone", resume=str(middle)) == 0
    for own, other in zip(
        steps_of(tmp_path / "alone"), steps_of(tmp_path / "whole")[HALF:], strict=True
    ):
        assert own["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert own["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-4)


def test_a_tuning_that_does_not_fit_the_model_is_refused_before_data_is_read(
    tmp_path: Path,
) -> None:
    write_corpus(tmp_path)
    recipe = tuned(tmp_path, LoRA(targets=("*.quary",)))
    with pytest.raises(UserError, match="matches no matrix of the model"):
        train(recipe, name="tiny", folder=tmp_path / "run")
    assert not (tmp_path / "cache").exists()
