"""GPT-OSS at its published sizes.

How it was trained is not published (OpenAI 2025, arXiv 2508.10925, says trillions of tokens);
tokens, rates and batches here are Llama 3's of the nearest size (see `recipes/llama3.py`). Context
is the one before its stretching with YaRN, 4,096, and so are the rotary frequencies: to go on from
there, set model.rope_scaling and model.max_seq_len to those of `models.gpt_oss`.
"""

from __future__ import annotations

from dataclasses import replace

from armillary.checkpoint.config import Checkpoint
from armillary.data.config import Data
from armillary.data.corpus_tables import HuggingFace
from armillary.data.tokenizer_subword import File
from armillary.models.gpt_oss import gpt_oss
from armillary.optim.adamw import AdamW
from armillary.optim.schedule import Cosine
from armillary.parallel.config import Compile, Full
from armillary.recipe.budget import Budget, Validation
from armillary.recipe.recipe import Recipe
from armillary.recipe.registry import recipe

TOKENS = 15.6e12
BATCH_TOKENS = 4 * 2**20
SEQ_LEN = 4096

RATES = {"20B": 3e-4, "120B": 1.5e-4}
"""Peak learning rate of each size."""


def build(size: str) -> Recipe:
    """The recipe of a size in `RATES`. It needs the family's tokenizer.json, which is not ours."""
    return Recipe(
        model=replace(gpt_oss(size), rope_scaling=None, max_seq_len=SEQ_LEN),
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

    sized.__doc__ = f"GPT-OSS {size}; set --data.tokenizer.path to its tokenizer.json."
    recipe(f"gpt-oss-{size.lower()}")(sized)


for _size in RATES:
    _register(_size)
