"""The small models and the ragged, packed data that every case trains on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from armillary.models.config import ModelConfig
from armillary.models.deepseek import DeepSeek
from armillary.models.gpt_oss import GptOss
from armillary.models.llama import Llama
from armillary.models.qwen3_moe import Qwen3MoE
from armillary.models.routing import RouterConfig
from armillary.parallel.config import Parallel
from armillary.recipe.budget import Budget, Sampling, Validation
from armillary.recipe.recipe import Recipe
from tiny_runs import tiny_recipe

STEPS = 10
SEQUENCES = 16
LENGTH = 64

_DENSE = Llama(
    vocab_size=260,
    dim=32,
    n_layers=8,
    n_heads=8,
    n_kv_heads=4,
    head_dim=8,
    ffn_dim=64,
    max_seq_len=128,
)


_SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "dim": 32,
    "n_layers": 4,
    "n_heads": 8,
    "ffn_dim": 64,
    "n_experts": 8,
    "n_active": 2,
    "expert_dim": 32,
    "max_seq_len": 128,
    # Scores that lie well apart: of two experts that are equal to the last bits, rounding may
    # choose either, and a token at another expert is another gradient.
    "init_std": 0.1,
}
_MIXTURES: dict[str, ModelConfig] = {
    "moe": Qwen3MoE(
        n_kv_heads=4,
        head_dim=8,
        router=RouterConfig(sequence_loss=1e-2, z_loss=1e-3, balance_rate=1e-3),
        **_SIZES,
    ),
    "deepseek": DeepSeek(
        n_kv_heads=8,
        query_rank=16,
        key_value_rank=16,
        plain_head_dim=8,
        rope_head_dim=8,
        value_head_dim=8,
        router=RouterConfig(
            score="sigmoid",
            scale=2.5,
            n_groups=4,
            n_top_groups=2,
            balance_rate=1e-3,
            sequence_loss=1e-3,
        ),
        **_SIZES,
    ),
    "gpt-oss": GptOss(n_kv_heads=4, head_dim=8, window=16, rope_scaling=None, **_SIZES),
}


def models() -> dict[str, ModelConfig]:
    """Dense, dense with tied embeddings, and one of each mixture family."""
    ahead = replace(_MIXTURES["deepseek"], predict_ahead=True)  # type: ignore[call-arg]
    tied = replace(_DENSE, tied_embeddings=True)
    return {"dense": _DENSE, "tied": tied, **_MIXTURES, "deepseek-ahead": ahead}


def base(folder: Path, model: str) -> Recipe:
    """float32, documents of very unequal lengths, rows that end in padding, ten steps."""
    recipe = tiny_recipe(folder, steps=STEPS, parallel=Parallel(device="cpu"))
    return replace(
        recipe,
        model=models()[model],
        budget=Budget(steps=STEPS, batch_tokens=SEQUENCES * LENGTH, seq_len=LENGTH),
        validation=Validation(every=0, sequences=4, final_sequences=8),
        sampling=Sampling(prompts=()),
        telemetry=replace(recipe.telemetry, gradient_norms="parameters"),
    )
