"""A model that learns little, starts in seconds and splits in every way up to four."""

from __future__ import annotations

from armillary.data.config import Data
from armillary.data.tokenizer_bytes import Bytes
from armillary.models.llama import Llama
from armillary.recipe.budget import Budget, Validation
from armillary.recipe.recipe import Recipe
from armillary.recipe.registry import recipe

SOURCES = {
    "model": "ours: small, and every size divides by four",
    "data.tokenizer": "ours: nothing to train before the first step",
    "budget": "ours: seconds on a CPU",
    "validation": "ours: seconds on a CPU",
}


@recipe("debug", family="debug", gpus=0, sources=SOURCES)
def debug() -> Recipe:
    """A tiny Llama on bytes, for trying things out: 8 layers, 8 heads, 4 kv heads."""
    return Recipe(
        model=Llama(
            vocab_size=260,  # 256 bytes, BOS, EOS, and two more so that four ranks share it evenly
            dim=128,
            n_layers=8,
            n_heads=8,
            n_kv_heads=4,
            ffn_dim=384,
            max_seq_len=1024,
        ),
        data=Data(tokenizer=Bytes()),
        budget=Budget(steps=20, batch_tokens=2048, seq_len=128),
        validation=Validation(sequences=16, final_sequences=16),
    )
