"""Qwen3, mixtures of experts, at their published sizes.

Tokens and context are those of the first of three stages: Yang et al. 2025, "Qwen3 technical
report", arXiv 2505.09388, section 3.2 (over 30 trillion tokens at 4,096). Rates and batches are
not published; these are Llama 3's of the nearest size (see `recipes/llama3.py`). The published
runs even out loads over the global batch; here it is within each row, with the model card's
coefficient. Their rotary base was 10,000 before its last stage, here it is the released model's.
"""

from __future__ import annotations

from armillary.checkpoint.config import Checkpoint
from armillary.data.config import Data
from armillary.data.corpus_tables import HuggingFace
from armillary.data.tokenizer_subword import File
from armillary.models.qwen3_moe import qwen3_moe
from armillary.optim.adamw import AdamW
from armillary.optim.schedule import Cosine
from armillary.parallel.config import Compile, Full
from armillary.recipe.budget import Budget, Validation
from armillary.recipe.recipe import Recipe
from armillary.recipe.registry import recipe

TOKENS = 30e12
BATCH_TOKENS = 4 * 2**20
SEQ_LEN = 4096

RATES = {"30B-A3B": 3e-4, "235B-A22B": 1.5e-4}
"""Peak learning rate of each size."""


def build(size: str) -> Recipe:
    """The recipe of a size in `RATES`. It needs the family's tokenizer.json, which is not ours."""
    return Recipe(
        model=qwen3_moe(size),
        data=Data(corpus=HuggingFace(name="allenai/c4", config="en"), tokenizer=File()),
        budget=Budget(tokens=TOKENS, batch_tokens=BATCH_TOKENS, seq_len=SEQ_LEN),
        optimizer=AdamW(lr=RATES[size], betas=(0.9, 0.95), weight_decay=0.1),
        schedule=Cosine(warmup_steps=8000, floor=0.01),
        activation_checkpoint=Full(),
        compile=Compile(enabled=True),
        validation=Validation(every=500, final_sequences=4096),
        checkpoint=Checkpoint(every=500),
    )


def _register(size: str) -> None:
    def sized() -> Recipe:
        return build(size)

    sized.__doc__ = f"Qwen3 {size}; set --data.tokenizer.path to its tokenizer.json."
    recipe(f"qwen3-{size.lower()}")(sized)


for _size in RATES:
    _register(_size)
