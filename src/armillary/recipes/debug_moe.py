"""Tiny mixtures of experts, one of each family, that split in every way up to four."""

from __future__ import annotations

from dataclasses import replace

from armillary.data.config import Data
from armillary.data.tokenizer_bytes import Bytes
from armillary.models.deepseek import deepseek
from armillary.models.gpt_oss import gpt_oss
from armillary.models.moe import MoEDecoder
from armillary.models.qwen3_moe import qwen3_moe
from armillary.recipe.budget import Budget, Validation
from armillary.recipe.recipe import Recipe
from armillary.recipe.registry import recipe
from armillary.recipes.debug import SOURCES


def build(model: MoEDecoder) -> Recipe:
    """Twelve steps of a debug size, on bytes."""
    return Recipe(
        model=replace(model, vocab_size=260, max_seq_len=1024),  # four ranks share it evenly
        data=Data(tokenizer=Bytes()),
        budget=Budget(steps=12, batch_tokens=2048, seq_len=128),
        validation=Validation(sequences=16, final_sequences=16),
    )


@recipe("debug-qwen3-moe", family="debug", gpus=0, sources=SOURCES)
def debug_qwen3_moe() -> Recipe:
    """A tiny Qwen3 with experts on bytes: 4 layers, 8 experts, 2 a token."""
    return build(qwen3_moe("debug"))


@recipe("debug-deepseek", family="debug", gpus=0, sources=SOURCES)
def debug_deepseek() -> Recipe:
    """A tiny DeepSeek-V3 on bytes: latent attention, grouped experts, selection biases."""
    return build(deepseek("debug"))


@recipe("debug-deepseek-ahead", family="debug", gpus=0, sources=SOURCES)
def debug_deepseek_ahead() -> Recipe:
    """The same, which also learns the token after the next."""
    return build(replace(deepseek("debug"), predict_ahead=True))


@recipe("debug-gpt-oss", family="debug", gpus=0, sources=SOURCES)
def debug_gpt_oss() -> Recipe:
    """A tiny GPT-OSS on bytes: sinks, a window of 32 in every other layer, biased experts."""
    return build(gpt_oss("debug"))
