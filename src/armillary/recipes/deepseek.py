"""DeepSeek-V2-Lite (16B), V2 (236B) and V3 (671B).

Rates, batches, tokens and context: V2 and V2-Lite, arXiv 2405.04434, section 3.1.2 and appendix B
(8.1 and 5.7 trillion tokens at 4,096; 9,216 and 4,608 sequences a batch; 2,000 steps of warm-up);
V3, arXiv 2412.19437, section 4.2 (14.8 trillion tokens at 4,096; 15,360 sequences; 2,000 steps; the
rate constant up to 10 trillion, then down to a tenth).

Positions are stretched with YaRN only after this training, in both publications; the models here
are not: to go on from there, set model.rope_scaling and model.max_seq_len to those of
`models.deepseek`.

Where these recipes differ: all parameters start there with a standard deviation of 0.006, here see
`DenseDecoder.init_std`; the published batches of V2 and V3 grow to their final size over the first
tokens; V2's rate falls in two steps of 0.316, here along a cosine to a tenth, which is where they
lead; V2 evens loads over experts (0.003), devices and messages, and drops tokens, here only within
rows, with the model card's coefficient, and no token is dropped; V3's rate falls along a cosine and
once more at the very end, here in a straight line; V3's selection biases rest in the last half
trillion tokens, here they move; V3's coefficient of the token after the next is 0.3 up to 10
trillion tokens and 0.1 after, here 0.3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from armillary.checkpoint.config import Checkpoint
from armillary.data.config import Data
from armillary.data.corpus_tables import HuggingFace
from armillary.data.tokenizer_subword import File
from armillary.models.deepseek import deepseek
from armillary.optim.adamw import AdamW
from armillary.optim.schedule import Cosine, ScheduleConfig, WarmupStableDecay
from armillary.parallel.config import Compile, Full
from armillary.recipe.budget import Budget, Validation
from armillary.recipe.recipe import Recipe
from armillary.recipe.registry import recipe

SEQ_LEN = 4096
WARMUP_STEPS = 2000


class Run(NamedTuple):
    """How a size was trained."""

    tokens: float
    sequences: int
    rate: float


RUNS = {
    "16B": Run(tokens=5.7e12, sequences=4608, rate=4.2e-4),
    "236B": Run(tokens=8.1e12, sequences=9216, rate=2.4e-4),
    "671B": Run(tokens=14.8e12, sequences=15_360, rate=2.2e-4),
}


def build(size: str) -> Recipe:
    """The recipe of a size in `RUNS`. It needs the family's tokenizer.json, which is not ours."""
    run, is_v3 = RUNS[size], size == "671B"
    schedule: ScheduleConfig = Cosine(warmup_steps=WARMUP_STEPS, floor=0.1)
    if is_v3:
        fall = 1 - 10 / 14.8
        schedule = WarmupStableDecay(warmup_steps=WARMUP_STEPS, decay_fraction=fall, floor=0.1)
    return Recipe(
        model=replace(deepseek(size), rope_scaling=None, max_seq_len=SEQ_LEN, predict_ahead=is_v3),
        data=Data(corpus=HuggingFace(name="allenai/c4", config="en"), tokenizer=File()),
        budget=Budget(tokens=run.tokens, batch_tokens=run.sequences * SEQ_LEN, seq_len=SEQ_LEN),
        optimizer=AdamW(lr=run.rate, betas=(0.9, 0.95), weight_decay=0.1),
        schedule=schedule,
        activation_checkpoint=Full(),
        compile=Compile(enabled=True),
        validation=Validation(every=500, final_sequences=4096),
        checkpoint=Checkpoint(every=500),
    )


def _register(size: str) -> None:
    def sized() -> Recipe:
        return build(size)

    name = {"16B": "V2-Lite", "236B": "V2", "671B": "V3"}[size]
    sized.__doc__ = f"DeepSeek-{name} {size}; set --data.tokenizer.path to its tokenizer.json."
    recipe(f"deepseek-{size.lower()}")(sized)


for _size in RUNS:
    _register(_size)
