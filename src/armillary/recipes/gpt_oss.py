"""GPT-OSS at its published sizes. (OpenAI 2025, arXiv 2508.10925)

How it was trained is not published ("trillions of tokens", section 2); tokens, rates and batches
here are Llama 3's of the nearest size (arXiv 2407.21783). Context is the one before its stretching
with YaRN, 4,096, and so are the rotary frequencies: to go on from there, set model.rope_scaling and
model.max_seq_len to those of `models.gpt_oss`, in a stage.
"""

from __future__ import annotations

from dataclasses import replace

from armillary.models.gpt_oss import gpt_oss
from armillary.optim.schedule import Cosine
from armillary.parallel.config import Parallel
from armillary.recipes.placing import Place, Run, architecture, register_run

CARD = "GPT-OSS model card, arXiv 2508.10925"
HERD = "Llama 3 herd, arXiv 2407.21783"
SEQ_LEN = 4096
RATES = {"20B": 3e-4, "120B": 1.5e-4}
"""Peak learning rate of each size: ours."""
EXPERTS = "ours: experts over the GPUs of a machine, where traffic is cheap"
PLACES = {
    "20B": [
        Place(gpus=8, rows=4, parallel=Parallel(ep=8), why=EXPERTS),
        Place(gpus=64, rows=8, parallel=Parallel(ep=8), why=EXPERTS),
    ],
    "120B": [
        Place(gpus=128, rows=8, parallel=Parallel(ep=8), why=EXPERTS),
    ],
}


def run_of(size: str) -> Run:
    """A run for a size in `RATES`."""
    model = replace(gpt_oss(size), rope_scaling=None, max_seq_len=SEQ_LEN)
    card = f"config.json of openai/gpt-oss-{size.lower()}; {CARD}, section 2, table 1"
    return Run(
        model=model,
        tokens=15.6e12,
        batch_tokens=4 * 2**20,
        seq_len=SEQ_LEN,
        rate=RATES[size],
        schedule=Cosine(warmup_steps=8000, floor=0.01),
        sources={
            **architecture(model, card),
            "model.router.sequence_loss": "ours: Qwen3's; how loads were evened is not published",
            "model.rope_scaling": "ours: config.json stretches from initial_context_length 4,096, "
            "which is where a run begins",
            "model.max_seq_len": "initial_context_length 4,096 in config.json",
            "budget.tokens": f"ours: not published; that of {HERD}, section 1",
            "budget.batch_tokens": f"ours: not published; that of {HERD}, section 3.4.1",
            "budget.seq_len": "ours: initial_context_length 4,096 in config.json",
            "optimizer.lr": f"ours: not published; that of the nearest size of {HERD}, table 3",
            "schedule": f"ours: not published; that of {HERD}, section 3.4.1",
        },
        what="at Llama 3's rates and length",
    )


for _size in RATES:
    register_run("gpt-oss", _size, f"GPT-OSS {_size}", run_of(_size), PLACES[_size])
