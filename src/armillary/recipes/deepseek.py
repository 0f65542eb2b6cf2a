"""DeepSeek-V2-Lite (16B), V2 (236B) and V3 (671B).

(V2 and V2-Lite: arXiv 2405.04434, sections 3.1.2 to 3.1.4 and appendix B. V3: arXiv 2412.19437,
sections 3.2, 4.2 and 4.3.) The recipes called after a size have one schedule and one batch; the
`long` ones have what was published, by stages: batches that grow, rates that fall, the weight of
the token after the next, the longer context with YaRN.

Where both differ from what was published: all parameters started with a standard deviation of
0.006, here see `DenseDecoder.init_std`; V2 evened loads over experts (0.003), devices and messages
and dropped tokens, here only within rows, with the model card's coefficient, and no token is
dropped; V3 computed products in 8 bits with scales of blocks, here in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from armillary.models.deepseek import deepseek
from armillary.optim.schedule import Constant, Cosine, ScheduleConfig, WarmupStableDecay
from armillary.parallel.config import Parallel
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

V2, V3 = "DeepSeek-V2, arXiv 2405.04434", "DeepSeek-V3, arXiv 2412.19437"
SEQ_LEN = 4096
WARMUP = ("schedule.warmup_steps=0",)
V2_SPLIT = "16-way zero-bubble pipeline, 8-way experts"
UNCOMPILED = "ours: a schedule that splits the backward pass cannot be compiled"
EXPERTS = "ours: experts over the GPUs of a machine, where traffic is cheap"
PLACES = {
    "16B": [
        Place(gpus=8, rows=4, parallel=Parallel(ep=8), why=EXPERTS),
        Place(gpus=64, rows=8, parallel=Parallel(ep=8), why=EXPERTS),
    ],
    "236B": [
        Place(
            gpus=256, rows=4, compiled=False,
            parallel=Parallel(pp=16, dp_shard=16, ep=8, schedule="ZBVZeroBubble"),
            why=f"{V2}, section 3.1.3: {V2_SPLIT}; ours: V-shaped, and how many GPUs",
            sources={"compile.enabled": UNCOMPILED},
        ),
    ],
    "671B": [],
}  # fmt: skip


def run_of(size: str) -> Run:
    """A size at its first context, with one schedule and one batch."""
    return _v3_run() if size == "671B" else _v2_run(size)


def _v2_run(size: str) -> Run:
    lite = size == "16B"
    where = f"{V2}, appendix B" if lite else f"{V2}, section 3.1.2"
    card = "DeepSeek-V2-Lite" if lite else "DeepSeek-V2"
    falls = "80 % and 90 %" if lite else "60 % and 90 %"
    batch = "4,608 sequences" if lite else "9,216 sequences; ours: from the first step"
    return _run(
        size,
        tokens=5.7e12 if lite else 8.1e12,
        sequences=4608 if lite else 9216,
        rate=4.2e-4 if lite else 2.4e-4,
        schedule=Cosine(warmup_steps=2000, floor=0.1),
        sources={
            "model": f"config.json of deepseek-ai/{card}; {where}",
            "model.router.sequence_loss": f"aux_loss_alpha in config.json of deepseek-ai/{card}",
            "budget.tokens": where,
            "budget.batch_tokens": f"{where}: {batch}",
            "budget.seq_len": f"{where}: 4K",
            "optimizer.lr": where,
            "schedule": f"ours: a cosine to a tenth, where two falls of 0.316, at {falls}, lead "
            f"({where})",
            "schedule.warmup_steps": f"{where}: 2K steps",
        },
    )


def _v3_run() -> Run:
    where = f"{V3}, section 4.2"
    run = _run(
        "671B",
        tokens=14.8e12,
        sequences=15_360,
        rate=2.2e-4,
        schedule=WarmupStableDecay(warmup_steps=2000, decay_fraction=1 - 10 / 14.8, floor=0.1),
        sources={
            "model": f"config.json of deepseek-ai/DeepSeek-V3; {where}",
            "model.predict_ahead": f"{V3}, section 2.2",
            "model.router.balance_rate": f"{where}: 0.001",
            "model.router.sequence_loss": f"{where}: 0.0001",
            "task.ahead_coefficient": f"{where}: 0.3 up to 10T tokens",
            "budget.tokens": where,
            "budget.batch_tokens": f"{where}: 15,360 sequences; ours: from the first step",
            "budget.seq_len": f"{where}: 4K",
            "optimizer.lr": where,
            "schedule": f"{where}: constant up to 10T tokens, then to a tenth; ours: in a straight "
            "line to the end",
            "schedule.warmup_steps": f"{where}: 2K steps",
        },
    )
    return replace(run, model=replace(run.model, predict_ahead=True))  # type: ignore[call-arg]


def _run(
    size: str,
    *,
    tokens: float,
    sequences: int,
    rate: float,
    schedule: ScheduleConfig,
    sources: Mapping[str, str],
) -> Run:
    unstretched = {
        "model.rope_scaling": "ours: YaRN comes with the longer context, in a stage",
        "model.max_seq_len": "ours: the context of this training, 4K",
    }
    model = replace(deepseek(size), rope_scaling=None, max_seq_len=SEQ_LEN)
    return Run(
        model=model,
        tokens=tokens,
        batch_tokens=sequences * SEQ_LEN,
        seq_len=SEQ_LEN,
        rate=rate,
        schedule=schedule,
        sources={**architecture(model, sources["model"]), **sources, **unstretched},
        what="as published, with one batch and schedule",
    )


def _batch(sequences: int, seq_len: int = SEQ_LEN) -> str:
    return f"budget.batch_tokens={sequences * seq_len}"


def _yarn(length: int, sharpening: float) -> tuple[str, ...]:
    return (
        f"budget.seq_len={length}", f"model.max_seq_len={length}", "model.rope_scaling.factor=40",
        f"model.rope_scaling.table_sharpening={sharpening}",
        f"model.rope_scaling.score_sharpening={sharpening}",
    )  # fmt: skip


def long_v2() -> Recipe:
    """V2 as it was trained, to a context of 32K."""
    place = replace(PLACES["236B"][0], rows=2)
    whole = replace(placed(run_of("236B"), place), schedule=Constant(warmup_steps=2000))
    first, second = ("optimizer.lr=7.584e-5", *WARMUP), ("optimizer.lr=2.3965e-5", *WARMUP)
    ramp = (2304, 4608, 6912)
    return staged(
        whole,
        *(
            Stage(name=f"batch-{rows}", tokens=225e9 / len(ramp), set=(_batch(rows),))
            for rows in ramp
        ),
        Stage(name="plateau", tokens=0.6 * 8.1e12 - 225e9),
        Stage(name="fall", tokens=0.3 * 8.1e12, set=first),
        Stage(name="end", tokens=0.1 * 8.1e12, set=second),
        Stage(
            name="32k",
            steps=1000,
            set=(*_yarn(32_768, 0.707), _batch(576, 32_768), *second,
                 "budget.microbatch_sequences=1", "parallel.dp_shard=8", "parallel.tp=2"),
        ),
    )  # fmt: skip


LONG_V2 = {
    "schedule": f"{V2}, section 3.1.2: constant between its falls",
    **{
        f"stages.{index}": f"{V2}, section 3.1.2: from 2,304 to 9,216 sequences over 225B tokens; "
        "ours: in three steps"
        for index in range(3)
    },
    "stages.3": f"{V2}, section 3.1.2: the full rate up to 60 % of the tokens",
    "stages.4": f"{V2}, section 3.1.2: times 0.316 at 60 % of the tokens",
    "stages.5": f"{V2}, section 3.1.2: times 0.316 again at 90 %",
    "stages.6": f"{V2}, section 3.1.4: YaRN (s 40, alpha 1, beta 32, 0.0707 ln s + 1), 1,000 steps "
    "of 576 sequences of 32K; ours: at the last rate, with tp 2",
}

V3_PLACE = Place(
    gpus=512,
    rows=2,
    parallel=Parallel(ep=64),
    why=f"{V3}, section 3.2: 64-way experts, no tp; ours: no pipeline, which does not go with "
    "model.predict_ahead, and 512 GPUs, which divide all its batches",
)


def long_v3() -> Recipe:
    """V3 as it was trained, to a context of 128K."""
    whole = replace(placed(run_of("671B"), V3_PLACE), schedule=Constant(warmup_steps=2000))
    ahead = ("task.ahead_coefficient=0.1",)
    rest = (*ahead, "model.router.balance_rate=1e-12")
    last = ("optimizer.lr=7.3e-6", *WARMUP, *rest)
    ramp = (3072, 6144, 9216, 12_288)
    return staged(
        whole,
        *(
            Stage(name=f"batch-{rows}", tokens=469e9 / len(ramp), set=(_batch(rows),))
            for rows in ramp
        ),
        Stage(name="plateau", tokens=10e12 - 469e9),
        Stage(name="fall", tokens=4.3e12,
              set=("schedule=cosine", *WARMUP, "schedule.floor=0.1", *ahead)),
        Stage(name="low", tokens=333e9, set=("optimizer.lr=2.2e-5", *WARMUP, *rest)),
        Stage(name="end", tokens=167e9, set=last),
        Stage(
            name="32k", steps=1000,
            set=(*_yarn(32_768, 1.0), _batch(1920, 32_768), *last, "parallel.tp=4",
                 "budget.microbatch_sequences=1"),
        ),
        Stage(
            name="128k", steps=1000,
            set=(*_yarn(131_072, 1.0), _batch(480, 131_072), *last, "parallel.tp=16",
                 "budget.microbatch_sequences=1"),
        ),
    )  # fmt: skip


_REST = "selection biases rest (a rate of 0 would take them away), the token after the next at 0.1"
LONG_V3 = {
    "schedule": f"{V3}, section 4.2: constant up to 10T tokens",
    **{
        f"stages.{index}": f"{V3}, section 4.2: from 3,072 to 15,360 sequences over 469B tokens; "
        "ours: in four steps"
        for index in range(4)
    },
    "stages.4": f"{V3}, section 4.2: the full rate up to 10T tokens",
    "stages.5": f"{V3}, section 4.2: a cosine to 2.2e-5 over 4.3T tokens; the token after the next "
    "at 0.1 from here on",
    "stages.6": f"{V3}, section 4.2: 2.2e-5 for 333B tokens; {_REST}",
    "stages.7": f"{V3}, section 4.2: 7.3e-6 for 167B tokens; {_REST}",
    "stages.8": f"{V3}, section 4.3: YaRN (s 40, 0.1 ln s + 1), 1,000 steps of 1,920 sequences of "
    "32K at 7.3e-6; ours: tp 4, and the rest as before",
    "stages.9": f"{V3}, section 4.3: 1,000 steps of 480 sequences of 128K at 7.3e-6; ours: tp 16, "
    "and the rest as before",
}
V3_PIPELINE = Place(
    gpus=2048,
    rows=1,
    compiled=False,
    parallel=Parallel(pp=16, dp_shard=128, ep=64, schedule="DualPipeV"),
    why=f"{V3}, sections 3.1 and 3.2: 2,048 GPUs, 16-way pipeline, 64-way experts, DualPipe; ours: "
    "its V-shaped form, and all of the state sharded, not only the moments",
    sources={"compile.enabled": UNCOMPILED},
)


def plain_v3() -> Run:
    """V3 without the token after the next, which does not go with a pipeline here."""
    run = run_of("671B")
    return replace(
        run,
        model=replace(run.model, predict_ahead=False),  # type: ignore[call-arg]
        sources={name: text for name, text in run.sources.items() if "ahead" not in name}
        | {"model.predict_ahead": "ours: it does not go with a pipeline"},
    )


NAMES = {"16B": "V2-Lite", "236B": "V2", "671B": "V3"}
for _size, _name in NAMES.items():
    register_run("deepseek", _size, f"DeepSeek-{_name} {_size}", run_of(_size), PLACES[_size])
register_run(
    "deepseek", "671B-plain", "DeepSeek-V3 671B, not looking ahead,", plain_v3(), [V3_PIPELINE]
)
for _name, _what, _make, _place, _stages in (
    ("236b-long", "DeepSeek-V2 236B as trained, by stages, to 32,768 tokens.",
     long_v2, PLACES["236B"][0], LONG_V2),
    ("671b-long", "DeepSeek-V3 671B as trained, by stages, to 131,072 tokens.",
     long_v3, V3_PLACE, LONG_V3),
):  # fmt: skip
    register(
        f"deepseek-{_name}-{_place.gpus}gpu", _what, _make, family="deepseek", gpus=_place.gpus,
        sources=sources_of(run_of(_name.partition("-")[0].upper()), _place, _stages),
    )  # fmt: skip
