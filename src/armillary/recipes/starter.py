"""The first run: a small Llama that learns Python from this machine's own standard library."""

from __future__ import annotations

from dataclasses import replace

from armillary.checkpoint.config import Checkpoint
from armillary.data.config import Data
from armillary.data.tokenizer_subword import Bpe
from armillary.models.llama import Llama
from armillary.optim.muon import Muon
from armillary.optim.schedule import WarmupStableDecay
from armillary.recipe.budget import Budget, Sampling, Validation
from armillary.recipe.recipe import Recipe
from armillary.recipe.registry import recipe
from armillary.telemetry.config import Telemetry

VOCABULARY = 4096
_TRIED = "ours: the best of what docs/decisions/0002-starter.md lists"
SOURCES = {
    "model": _TRIED,
    "optimizer": _TRIED,
    "schedule": _TRIED,
    "budget.tokens": "ours: five minutes on two cores",
    "validation": "ours: three looks on the way; more context for each token at the end",
    "checkpoint.every": "ours: as often as a look at validation",
    "telemetry.log_every": "ours: a line every few seconds",
    "sampling.prompts": "ours: how Python files go on",
}


@recipe("starter", family="first run", gpus=0, sources=SOURCES)
def starter() -> Recipe:
    """A small Llama on the Python standard library: five minutes on two CPU cores.

    What was tried before these values were chosen is in docs/decisions/0002-starter.md.
    """
    return Recipe(
        model=Llama(
            vocab_size=VOCABULARY,
            dim=192,
            n_layers=4,
            n_heads=3,
            n_kv_heads=3,
            ffn_dim=512,
            rope_theta=10_000.0,
            max_seq_len=1024,
        ),
        data=Data(tokenizer=Bpe(vocab_size=VOCABULARY)),
        budget=Budget(tokens=2.2e6, batch_tokens=4096, seq_len=256),
        optimizer=Muon(lr=1e-2, adamw_lr=4e-2),
        schedule=WarmupStableDecay(warmup_fraction=0.04, decay_fraction=0.6),
        validation=Validation(every=100, final_stride=128),
        checkpoint=Checkpoint(every=100),
        telemetry=Telemetry(log_every=10),
        sampling=Sampling(prompts=("def ", "import ", "class Test")),
    )


@recipe(
    "starter-long",
    family="first run",
    gpus=0,
    sources=SOURCES | {"budget.tokens": "ours: nearly an epoch, fifteen minutes on two cores"},
)
def starter_long() -> Recipe:
    """The starter read for nearly a whole epoch: a quarter of an hour on two CPU cores."""
    short = starter()
    return replace(
        short,
        budget=replace(short.budget, tokens=8e6),
        validation=replace(short.validation, every=200),
        checkpoint=Checkpoint(every=200),
    )
