"""Every curated recipe is sound, complete and survives being written down."""

from __future__ import annotations

import json
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
from armillary.recipe.registry import card
from armillary.recipe.registry import describe as describe_recipe
from armillary.recipe.stages import spans_of
from armillary.recipe.tree import leaves
from armillary.training.train import train

NAMES = names()
SMALL = tuple(name for name in NAMES if card(name).gpus == 0 and card(name).family != "fine-tuning")
"""Of those for a CPU, which read text that is there; conversations are the user's."""


@pytest.mark.parametrize("name", NAMES)
def test_a_written_recipe_reads_back_as_it_was(name: str, tmp_path: Path) -> None:
    made = get(name)
    file = tmp_path / "recipe.toml"
    file.write_text(to_toml(made))
    for base in (Recipe(), get("qwen3-0.6b")):
        again = apply(base, [read_toml(file)])
        assert again == made
        assert recipe_sha256(again) == recipe_sha256(made)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_has_no_problems_on_the_ranks_that_it_is_for(name: str) -> None:
    """On a CPU a few; as many GPUs as it is told for; or any usual number of them."""
    gpus, small = card(name).gpus, name in SMALL
    anywhere = (1, 2, 4) if gpus == 0 else (1, 2, 4, 64, 512)
    for world_size in (gpus,) if gpus else anywhere:
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
            assert leaf.name == "stages" or "GROUP" not in short_type(leaf.annotation).replace(
                "GROUP|none", ""
            )


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
    for span in spans_of(get(name)):
        model, seq_len = span.recipe.model, span.recipe.budget.seq_len
        assert isinstance(model, DenseDecoder)
        if isinstance(model.rope_scaling, YarnRopeScaling):
            assert seq_len > model.rope_scaling.original_max_seq_len or name in SMALL


def test_the_debug_model_splits_by_every_degree_up_to_four() -> None:
    model = get("debug").model
    for name in ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim"):
        assert getattr(model, name) % 4 == 0, name


DENSE = ("deepseek-cpu", "gpt-oss-cpu")
"""Miniatures that have most of what the others have too."""
CPU = [
    name if name in DENSE else pytest.param(name, marks=pytest.mark.full)
    for name in NAMES
    if name.endswith("-cpu")
]


@pytest.mark.parametrize("name", CPU)
def test_a_miniature_trains_on_text_that_is_here(name: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("def ring(star):\n    return star + 1\n\n" * 400)
    made = apply(
        get(name),
        options=[
            Option("data.corpus", "text"),
            Option("data.corpus.files", str(tmp_path / "text.txt")),
            Option("data.corpus.separator", "\\n\\n"),
            Option("data.tokenizer", "bytes"),
            Option("data.cache", str(tmp_path / "cache")),
            Option("data.workers", "1"),
            Option("budget.steps", "2"),
            Option("budget.batch_tokens", "128"),
            Option("budget.seq_len", "64"),
            Option("sampling.tokens", "2"),
            Option("validation.final_sequences", "2"),
            Option("telemetry.console", "off"),
        ],
    )
    assert train(made, name=name, folder=tmp_path / "run") == 0
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").open()]
    assert [event["step"] for event in events if event["kind"] == "step"] == [1, 2]
