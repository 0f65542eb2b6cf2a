"""Qwen3, dense and with experts. (Yang et al. 2025, "Qwen3 technical report", arXiv 2505.09388)

Section 3.2 has three stages: over 30 trillion tokens at 4,096; about 5 trillion of better text,
the rate falling faster; hundreds of billions at 32,768, the rotary base raised from 10,000 to
1,000,000. Rates and batches are not published; these are Llama 3's of the nearest size (arXiv
2407.21783, table 3). The published runs even out loads of experts over the global batch; here it is
within each row, with the model card's coefficient. The released models learned from larger ones
too (section 4.5), which is not pre-training.
"""

from __future__ import annotations

from dataclasses import replace

from armillary.models.moe import MoEDecoder
from armillary.models.qwen3 import qwen3
from armillary.models.qwen3_moe import qwen3_moe
from armillary.optim.schedule import Cosine
from armillary.parallel.config import Parallel, Selective
from armillary.recipe.recipe import Recipe
from armillary.recipe.stages import Stage
from armillary.recipes.placing import (
    Place,
    Run,
    architecture,
    placed,
    register,
    register_run,
    sources_of,
    staged,
)

REPORT = "Qwen3 technical report, arXiv 2505.09388"
HERD = "Llama 3 herd, arXiv 2407.21783"
SEQ_LEN = 4096
RATES = {
    "0.6B": 3e-4, "1.7B": 3e-4, "4B": 3e-4, "8B": 3e-4, "14B": 3e-4, "32B": 1.5e-4,
    "30B-A3B": 3e-4, "235B-A22B": 1.5e-4,
}  # fmt: skip
"""Peak learning rate of each size: ours."""
EXPERTS = "ours: experts over the GPUs of a machine, where traffic is cheap"
PLACES = {
    "0.6B": [
        Place(gpus=1, rows=8, keeps=Selective()),
        Place(gpus=8, rows=8, keeps=Selective()),
        Place(gpus=64, rows=8, keeps=Selective()),
    ],
    "1.7B": [
        Place(gpus=1, rows=4, keeps=Selective()),
        Place(gpus=8, rows=8, keeps=Selective()),
        Place(gpus=64, rows=8, keeps=Selective()),
    ],
    "4B": [
        Place(gpus=1, rows=1),
        Place(gpus=8, rows=4, keeps=Selective()),
        Place(gpus=64, rows=4, keeps=Selective()),
    ],
    "8B": [
        Place(gpus=8, rows=2, keeps=Selective()),
        Place(gpus=128, rows=2, keeps=Selective()),
    ],
    "14B": [
        Place(gpus=8, rows=4),
        Place(gpus=128, rows=2, keeps=Selective()),
    ],
    "32B": [
        Place(gpus=256, rows=1, keeps=Selective()),
    ],
    "30B-A3B": [
        Place(gpus=8, rows=1, parallel=Parallel(ep=8), why=EXPERTS),
        Place(gpus=64, rows=4, parallel=Parallel(ep=8), why=EXPERTS),
    ],
    "235B-A22B": [
        Place(gpus=256, rows=2, parallel=Parallel(ep=8), why=EXPERTS),
    ],
}


def run_of(size: str) -> Run:
    """The first stage of a size in `RATES`."""
    model = qwen3_moe(size) if "-A" in size else qwen3(size)
    table = "table 2" if isinstance(model, MoEDecoder) else "table 1"
    model = replace(model, rope_theta=1e4, max_seq_len=SEQ_LEN)
    return Run(
        model=model,
        tokens=30e12,
        batch_tokens=4 * 2**20,
        seq_len=SEQ_LEN,
        rate=RATES[size],
        schedule=Cosine(warmup_steps=8000, floor=0.01),
        sources={
            **architecture(model, f"config.json of Qwen/Qwen3-{size}; {REPORT}, {table}"),
            "model.rope_theta": f"{REPORT}, section 3.2: 10,000 before the last stage",
            "model.max_seq_len": f"{REPORT}, section 3.2: 4,096 tokens",
            "budget.tokens": f"{REPORT}, section 3.2: over 30T tokens in the first stage",
            "budget.batch_tokens": f"ours: not published; that of {HERD}, section 3.4.1",
            "budget.seq_len": f"{REPORT}, section 3.2: 4,096 tokens",
            "optimizer.lr": f"ours: not published; that of the nearest size of {HERD}, table 3",
            "schedule": f"ours: not published; that of {HERD}, section 3.4.1",
        },
        what="in its first stage, at Llama 3's rates",
    )


LONG_PLACE = PLACES["8B"][1]


def long_8b() -> Recipe:
    """8B through all three stages."""
    return staged(
        placed(run_of("8B"), LONG_PLACE),
        Stage(name="general", tokens=30e12, set=("schedule.floor=0.1",)),
        Stage(
            name="reasoning",
            tokens=5e12,
            set=("optimizer.lr=3e-5", "schedule=linear", "schedule.warmup_steps=0",
                 "schedule.floor=0.1"),
        ),
        Stage(
            name="long",
            tokens=300e9,
            set=(
                "budget.seq_len=32768", "budget.microbatch_sequences=1",
                "model.max_seq_len=32768", "model.rope_theta=1000000",
                "activation_checkpoint=full", "optimizer.lr=3e-6", "schedule=constant",
            ),
        ),
    )  # fmt: skip


LONG_SOURCES = {
    "stages.0": f"{REPORT}, section 3.2 (1): over 30T tokens at 4,096; ours: down to a tenth",
    "stages.1": f"{REPORT}, section 3.2 (2): about 5T tokens at 4,096, the rate falling faster; "
    "ours: from a tenth of the peak in a straight line to a hundredth",
    "stages.2": f"{REPORT}, section 3.2 (3): hundreds of billions of tokens at 32,768, the rotary "
    "base 1,000,000; ours: 300 billion, at the rate that the second stage ends with",
}

for _size in RATES:
    register_run("qwen3", _size, f"Qwen3 {_size}", run_of(_size), PLACES[_size])
register(
    "qwen3-8b-long-128gpu", "Qwen3 8B through its three stages, to 32,768 tokens.",
    long_8b, family="qwen3", gpus=128,
    sources=sources_of(run_of("8B"), LONG_PLACE, LONG_SOURCES),
)  # fmt: skip
