"""Llama 3, 3.1 and 3.2 at their published sizes.

Rates, batch, warm-up and schedule of 8B, 70B and 405B: Grattafiori et al. 2024, "The Llama 3 herd
of models", arXiv 2407.21783, table 3 and section 3.4.1 (AdamW, peak rate reached after 8,000
steps, cosine down to a hundredth, 15.6 trillion tokens). The published 405B run grew its batch
from 4M tokens at a context of 4,096 to 8M and then 16M at 8,192; here it is 4M at 8,192
throughout. 1B and 3B were made from larger models and have no published rate of their own; they
get that of 8B.
"""

from __future__ import annotations

from armillary.checkpoint.config import Checkpoint
from armillary.data.config import Data
from armillary.data.corpus_tables import HuggingFace
from armillary.data.tokenizer_subword import File
from armillary.models.llama import llama3
from armillary.optim.adamw import AdamW
from armillary.optim.schedule import Cosine
from armillary.parallel.config import ActivationCheckpointConfig, Compile, Full, Selective
from armillary.recipe.budget import Budget, Validation
from armillary.recipe.recipe import Recipe
from armillary.recipe.registry import recipe

TOKENS = 15.6e12
BATCH_TOKENS = 4 * 2**20
SEQ_LEN = 8192

RATES = {"1B": 3e-4, "3B": 3e-4, "8B": 3e-4, "70B": 1.5e-4, "405B": 8e-5}
"""Peak learning rate of each size."""


def build(size: str) -> Recipe:
    """The recipe of a size in `RATES`. It needs the family's tokenizer.json, which is not ours."""
    large: ActivationCheckpointConfig = Full() if size in ("70B", "405B") else Selective()
    return Recipe(
        model=llama3(size),
        data=Data(corpus=HuggingFace(name="allenai/c4", config="en"), tokenizer=File()),
        budget=Budget(tokens=TOKENS, batch_tokens=BATCH_TOKENS, seq_len=SEQ_LEN),
        optimizer=AdamW(lr=RATES[size], betas=(0.9, 0.95), weight_decay=0.1),
        schedule=Cosine(warmup_steps=8000, floor=0.01),
        activation_checkpoint=large,
        compile=Compile(enabled=True),
        validation=Validation(every=500, final_sequences=4096),
        checkpoint=Checkpoint(every=500),
    )


def _register(size: str) -> None:
    def sized() -> Recipe:
        return build(size)

    sized.__doc__ = f"Llama 3 {size}; set --data.tokenizer.path to its tokenizer.json."
    recipe(f"llama3-{size.lower()}")(sized)


for _size in RATES:
    _register(_size)
