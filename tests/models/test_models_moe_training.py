"""Families with experts in the trainer: debug recipes, and looking ahead on every mesh it can."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from armillary.models import DeepSeek, RouterConfig
from armillary.parallel.config import Parallel
from armillary.recipe import get, problems
from armillary.recipe.budget import Sampling, Validation
from armillary.recipe.recipe import Recipe
from armillary.training.train import train
from ranks import run_ranks
from tiny_runs import accumulating, events_of, tiny_recipe, write_corpus

MESHES = {
    "fsdp": Parallel(dp_shard=4),
    "hsdp accumulated": Parallel(dp_replicate=2, dp_shard=2),
    "tp and ep": Parallel(dp_shard=2, tp=2, ep=4),
}


def ahead(folder: Path, parallel: Parallel) -> Recipe:
    """Ragged rows on which the two losses have different weights on every rank."""
    recipe = tiny_recipe(folder, steps=6, parallel=replace(parallel, device="cpu"))
    model = DeepSeek(
        vocab_size=260, dim=32, n_layers=3, n_heads=4, n_kv_heads=4, ffn_dim=64, max_seq_len=64,
        query_rank=16, key_value_rank=16, plain_head_dim=8, rope_head_dim=8, value_head_dim=8,
        n_experts=8, n_active=2, expert_dim=32, predict_ahead=True,
        router=RouterConfig(score="sigmoid", balance_rate=1e-3, sequence_loss=1e-2, z_loss=1e-3),
    )  # fmt: skip
    return replace(
        recipe,
        model=model,
        validation=Validation(every=0, sequences=4, final_sequences=8),
        sampling=Sampling(prompts=()),
        telemetry=replace(recipe.telemetry, gradient_norms="parameters"),
    )


def train_meshes(folder: str) -> None:
    torch.set_num_threads(1)
    for name, parallel in MESHES.items():
        recipe = ahead(Path(folder), parallel)
        if "accumulated" in name:
            recipe = accumulating(recipe, 2)
        assert train(recipe, name=name, folder=Path(folder) / name) == 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ahead")
    write_corpus(folder)
    assert train(ahead(folder, Parallel()), name="alone", folder=folder / "alone") == 0
    run_ranks(train_meshes, 4, str(folder))
    return folder


@pytest.mark.parametrize("mesh", MESHES)
def test_looking_ahead_gives_one_answer_on_every_mesh(runs: Path, mesh: str) -> None:
    ours, oracle = (events_of(runs / name, "step") for name in (mesh, "alone"))
    for one, other in zip(ours, oracle, strict=True):
        for name in ("loss", "gradient_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-5)
        for name in ("expert_load_max_over_mean", "expert_idle_share"):
            assert one[name] == pytest.approx(other[name], rel=1e-6)
        norms = other["gradient_norms"]
        assert any(name.startswith("layers.3.") for name in norms)  # the extra block
        for name, norm in norms.items():
            close = 1e-5 * max(norm, 1e-2 * other["gradient_norm"])
            assert abs(one["gradient_norms"][name] - norm) <= close, name
    validations = [
        [event["loss"] for event in events_of(runs / name, "validation")]
        for name in (mesh, "alone")
    ]
    assert validations[0] == pytest.approx(validations[1], rel=1e-5)


def test_looking_ahead_is_refused_where_it_cannot_be_split(tmp_path: Path) -> None:
    for axis in ("pp", "cp"):
        recipe = replace(get("debug-deepseek-ahead"), parallel=Parallel(**{axis: 2}))
        messages = [f"{p.message} {p.allowed} {p.fix}" for p in problems(recipe, 2, data=False)]
        assert any("predict_ahead" in message for message in messages), messages


DEBUG = ("debug-qwen3-moe", "debug-deepseek", "debug-deepseek-ahead", "debug-gpt-oss")


@pytest.mark.parametrize("name", DEBUG)
def test_debug_recipes_train(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    write_corpus(tmp_path)
    data = tiny_recipe(tmp_path, steps=1).data
    recipe = get(name)
    quiet = replace(recipe.telemetry, console="off")
    small = replace(recipe, data=data, telemetry=quiet, sampling=Sampling(prompts=()))
    assert train(small, name=name, folder=tmp_path / "run") == 0
    steps = events_of(tmp_path / "run", "step")
    assert [step["step"] for step in steps] == list(range(1, 13))
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.1
    assert all(1 <= step["expert_load_max_over_mean"] <= 8 for step in steps)
    assert ("expert_bias_mean_absolute" in steps[-1]) == ("deepseek" in name)
    json.dumps(steps)
