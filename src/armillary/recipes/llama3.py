"""Llama 3, 3.1 and 3.2. (Grattafiori et al. 2024, "The Llama 3 herd of models", arXiv 2407.21783)

8B, 70B and 405B were trained on 15.6 trillion tokens: AdamW, 8,000 steps of warm-up, a cosine down
to a hundredth, the batch grown with the context (section 3.4.1: of 405B; "similar recipes" for the
others), then six stages of longer context on 800 billion tokens (3.4.2) and an annealing on the
last 40 million (3.4.3). 1B and 3B were pruned from larger models and learned from their logits, so
there is no published run of theirs; they get that of 8B here.

Betas and weight decay are not published: here the defaults, which are those of most. The stretching
of positions is in the released models from 3.1 on, and here from the first stage of longer context
on. Checkpoints of the annealing were averaged at the end, which no recipe does.
"""

from __future__ import annotations

from dataclasses import replace

from armillary.models.llama import llama3
from armillary.optim.schedule import Cosine
from armillary.parallel.config import Parallel, Selective
from armillary.recipe.recipe import Recipe
from armillary.recipe.stages import Stage
from armillary.recipes.placing import (
    TITAN,
    Place,
    Run,
    architecture,
    placed,
    register,
    register_run,
    sources_of,
    staged,
)

HERD = "Llama 3 herd, arXiv 2407.21783"
BATCH = 4 * 2**20
CARDS = {
    "1B": "meta-llama/Llama-3.2-1B", "3B": "meta-llama/Llama-3.2-3B",
    "8B": "meta-llama/Meta-Llama-3-8B", "70B": "meta-llama/Meta-Llama-3-70B",
    "405B": "meta-llama/Llama-3.1-405B",
}  # fmt: skip
RATES = {"1B": 3e-4, "3B": 3e-4, "8B": 3e-4, "70B": 1.5e-4, "405B": 8e-5}
"""Peak learning rate of each size: table 3; 1B and 3B as 8B."""

PLACES = {
    "1B": [
        Place(gpus=1, rows=4, keeps=Selective()),
        Place(gpus=8, rows=4, keeps=Selective()),
        Place(gpus=64, rows=4, keeps=Selective()),
    ],
    "3B": [
        Place(gpus=1, rows=2),
        Place(gpus=8, rows=2, keeps=Selective()),
        Place(gpus=64, rows=2, keeps=Selective()),
    ],
    "8B": [
        Place(gpus=8, rows=1, keeps=Selective()),
        Place(
            gpus=128, rows=2, keeps=Selective(),
            sources={
                "activation_checkpoint": f"selective on 128 GPUs: {TITAN}, table 3)",
                "budget.microbatch_sequences": f"2 on 128 GPUs: {TITAN}, table 3)",
            },
        ),
    ],
    "70B": [
        Place(
            gpus=256, rows=16, parallel=Parallel(dp_shard=32, tp=8),
            why=f"fsdp 32, tp 8 on 256 GPUs: {TITAN}, table 4)",
            sources={
                "activation_checkpoint": f"full on 256 GPUs: {TITAN}, table 4)",
                "budget.microbatch_sequences": f"16 on 256 GPUs: {TITAN}, table 4)",
            },
        ),
    ],
    "405B": [
        Place(
            gpus=512, rows=1,
            parallel=Parallel(dp_shard=8, tp=8, pp=8, schedule="Interleaved1F1B"),
            why=f"fsdp 8, tp 8, pp 8, interleaved, on 512 GPUs: {TITAN}, table 5)",
            sources={"activation_checkpoint": f"full on 512 GPUs: {TITAN}, table 5)"},
        ),
    ],
}  # fmt: skip


def run_of(size: str) -> Run:
    """The published run of a size in `RATES`, at its main context."""
    made_small = size in ("1B", "3B")
    rate = "ours: 8B's, as there is none" if made_small else f"{HERD}, table 3"
    card = f"config.json of {CARDS[size]}" + ("" if made_small else f"; {HERD}, table 3")
    model = replace(llama3(size), rope_scaling=None, max_seq_len=8192)
    return Run(
        model=model,
        tokens=15.6e12,
        batch_tokens=BATCH,
        seq_len=8192,
        rate=RATES[size],
        schedule=Cosine(warmup_steps=8000, floor=0.01),
        sources={
            **architecture(model, card),
            "model.rope_scaling": "ours: stretching comes with the longer context, in a stage",
            "model.max_seq_len": f"{HERD}, section 3.4.1: 8,192",
            "budget.tokens": f"{HERD}, section 1: 15.6T tokens",
            "budget.batch_tokens": f"{HERD}, section 3.4.1: 4M tokens at first; ours: throughout",
            "budget.seq_len": f"{HERD}, section 3.4.1: 8,192; ours: from the first step",
            "optimizer.lr": rate,
            "schedule": f"{HERD}, section 3.4.1: cosine to a hundredth; ours: over the whole run, "
            "published over 1.2M steps",
            "schedule.warmup_steps": f"{HERD}, section 3.4.1: 8,000 steps",
        },
        what="with 8B's run" if made_small else "as published, at one context and batch",
    )


LONG = "six stages from 8K to 128K on 800B tokens, section 3.4.2"
LONG_PLACE = PLACES["8B"][1]


def _longer(length: int, cp: int, batch_tokens: int = BATCH) -> Stage:
    """A stage of the long context: five after the first, of the 800B tokens a fifth each."""
    return Stage(
        name=f"{length // 1024}k",
        tokens=160e9,
        set=(
            f"budget.seq_len={length}", f"budget.batch_tokens={batch_tokens}",
            "budget.microbatch_sequences=1", "activation_checkpoint=full", f"parallel.cp={cp}",
            f"model.max_seq_len={length}", "model.rope_scaling.factor=8",
        ),
    )  # fmt: skip


def long_8b() -> Recipe:
    """8B with longer and longer context, then annealed."""
    last = _longer(131_072, 8)
    anneal = ("optimizer.lr=3e-6", "schedule=linear", "schedule.warmup_steps=0", "schedule.floor=0")
    return staged(
        placed(run_of("8B"), LONG_PLACE),
        Stage(name="8k", tokens=14.8e12),
        _longer(16_384, 1),
        _longer(32_768, 1),
        _longer(65_536, 2),
        _longer(98_304, 4, 32 * 98_304),
        last,
        replace(last, name="anneal", tokens=40e6, set=(*last.set, *anneal)),
    )


LONG_SOURCES = {
    "stages.0": f"{HERD}: 15.6T tokens less those of the stages after it",
    **{
        f"stages.{index}": f"{HERD}: {LONG}; ours: lengths in between, their tokens and meshes; "
        "stretching as in config.json of meta-llama/Llama-3.1-8B, from here on"
        for index in range(1, 6)
    },
    "stages.6": f"{HERD}, section 3.4.3: the rate falls linearly to 0 over the last 40M tokens at "
    "128K; ours: it begins where the cosine ends",
}
BIG = replace(
    PLACES["405B"][0], gpus=16_384, parallel=Parallel(dp_shard=128, tp=8, pp=16),
    why=f"tp 8, pp 16, dp 128 on 16,384 GPUs: {HERD}, table 4", sources={},
)  # fmt: skip


def staged_405b() -> Recipe:
    """405B as it was trained, up to the long context: context and batch grow."""
    few = "parallel.schedule=GPipe"  # 1F1B takes no fewer microbatches than stages
    return staged(
        placed(run_of("405B"), BIG),
        Stage(name="4k", tokens=252e6, set=("budget.seq_len=4096", few)),
        Stage(name="8k", tokens=2.87e12 - 252e6, set=("budget.batch_tokens=8388608", few)),
        Stage(name="16m", tokens=15.6e12 - 2.87e12, set=("budget.batch_tokens=16777216",)),
    )


BIG_SOURCES = {
    "stages": f"{HERD}, section 3.4.1: 4M tokens at 4,096, after 252M 8M at 8,192, after 2.87T "
    "16M; ours: GPipe where there are fewer microbatches than stages",
}

for _size in RATES:
    register_run("llama3", _size, f"Llama 3 {_size}", run_of(_size), PLACES[_size])
register(
    "llama3-8b-long-128gpu", "Llama 3.1 8B to 131,072 tokens and annealed, by stages.",
    long_8b, family="llama3", gpus=128,
    sources=sources_of(run_of("8B"), LONG_PLACE, LONG_SOURCES),
)  # fmt: skip
register(
    "llama3-405b-16384gpu", "Llama 3.1 405B as trained, by stages of context and batch.",
    staged_405b, family="llama3", gpus=16_384,
    sources=sources_of(run_of("405B"), BIG, BIG_SOURCES),
)  # fmt: skip
