"""Every curated recipe is sound, complete and survives being written down."""

from __future__ import annotations

from pathlib import Path

import pytest

from armillary.models import YarnRopeScaling
from armillary.models.deepseek.config import DEEPSEEK_SIZES
from armillary.models.dense import DenseDecoder
from armillary.models.gpt_oss.config import GPT_OSS_SIZES
from armillary.models.llama import LLAMA_SIZES
from armillary.models.qwen3 import QWEN3_SIZES
from armillary.models.qwen3_moe.config import QWEN3_MOE_SIZES
from armillary.recipe import get, names, problems, read_toml, recipe_sha256, to_toml
from armillary.recipe.coerce import describe, short_type
from armillary.recipe.overrides import Option, apply
from armillary.recipe.recipe import Recipe
from armillary.recipe.registry import describe as describe_recipe
from armillary.recipe.tree import leaves

NAMES = names()
SMALL = tuple(name for name in NAMES if name.startswith(("debug", "starter")))


@pytest.mark.parametrize("name", NAMES)
def test_a_written_recipe_reads_back_as_it_was(name: str, tmp_path: Path) -> None:
    made = get(name)
    file = tmp_path / "recipe.toml"
    file.write_text(to_toml(made))
    for base in (Recipe(), get("starter"), get("qwen3-0.6b")):
        again = apply(base, [read_toml(file)])
        assert again == made
        assert recipe_sha256(again) == recipe_sha256(made)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_has_no_problems_on_any_usual_number_of_ranks(name: str) -> None:
    small = name in SMALL
    for world_size in (1, 2, 4) if small else (1, 2, 4, 64, 512):
        assert problems(get(name), world_size, data=small) == []


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("steps", [1, 2, 3, 20])
def test_a_small_recipe_can_be_cut_to_any_length(name: str, steps: int) -> None:
    made = get(name)
    typed = apply(made, options=[Option("budget.steps", str(steps))])
    assert typed.budget.total_steps == steps
    assert problems(typed) == []


def test_every_leaf_says_what_it_is_and_what_fits() -> None:
    for name in NAMES:
        assert describe_recipe(name)
        for leaf in leaves(get(name)):
            assert leaf.doc, f"{leaf.name} has no doc"
            assert describe(leaf.annotation)
            assert "GROUP" not in short_type(leaf.annotation).replace("GROUP|none", "")


def test_the_families_are_there_in_all_their_sizes() -> None:
    llama = {f"llama3-{size.lower()}" for size in LLAMA_SIZES if size != "debug"}
    qwen = {f"qwen3-{size.lower()}" for size in QWEN3_SIZES if size != "debug"}
    experts = {
        f"{family}-{size.lower()}"
        for family, sizes in (
            ("qwen3", QWEN3_MOE_SIZES), ("deepseek", DEEPSEEK_SIZES), ("gpt-oss", GPT_OSS_SIZES),
        )
        for size in sizes
        if size != "debug"
    }  # fmt: skip
    assert set(NAMES) >= llama | qwen | experts | {"debug", "starter", "starter-long"}
    assert get("llama3-405b").model.parameter_count() == 405_853_388_800


@pytest.mark.parametrize("name", NAMES)
def test_positions_are_not_stretched_beyond_the_context_of_a_recipe(name: str) -> None:
    model, seq_len = get(name).model, get(name).budget.seq_len
    assert isinstance(model, DenseDecoder)
    if isinstance(model.rope_scaling, YarnRopeScaling):
        assert seq_len > model.rope_scaling.original_max_seq_len or name in SMALL


def test_the_debug_model_splits_by_every_degree_up_to_four() -> None:
    model = get("debug").model
    for name in ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim"):
        assert getattr(model, name) % 4 == 0, name
