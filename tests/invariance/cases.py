"""The table: every mesh and option whose run must equal the run of one process.

A case is a set of leaves on top of a base recipe, so what is tested is what a user would type.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

LIMIT = 1e-5
"""Largest relative deviation of losses and norms in fp32, unless a case says why it needs more."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run that is compared with its oracle: the same model in one process, plainly."""

    world: int
    """Ranks."""
    model: str = "dense"
    """Base recipe, see `recipes.py`."""
    leaves: dict[str, str] = field(default_factory=dict)
    """What differs from the oracle."""
    limit: float = LIMIT
    why: str = ""
    """Why the limit is wider than `LIMIT`."""
    fast: bool = False
    """Whether it is in the subset that always runs."""


def _mesh(**degrees: int) -> dict[str, str]:
    return {"parallel.dp_shard": "1"} | {f"parallel.{axis}": str(n) for axis, n in degrees.items()}


ACCUMULATE = {"budget.microbatch_sequences": "1"}
FOUR = {"budget.microbatch_sequences": "4"}
"""Four microbatches of four rows where a rank has all sixteen."""
TWO = {"budget.microbatch_sequences": "2"}

TABLE = Path(__file__).with_name("schedule.csv")
"""A schedule of one's own: four microbatches on two ranks, one with a split backward pass."""

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved-1f1b": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "interleaved-zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dual-pipe-v": "DualPipeV",
}
CONTEXTS = {
    "all-gather": {"parallel.context": "all-gather"},
    "all-gather-contiguous": {"parallel.context": "all-gather", "parallel.context_balance": "none"},
    "ring": {"parallel.context": "ring"},
    "ring-contiguous": {"parallel.context": "ring", "parallel.context_balance": "none"},
    "ulysses": {"parallel.context": "ulysses"},
}
CHECKPOINTING = {
    "full": {"activation_checkpoint": "full"},
    "every-k": {"activation_checkpoint": "every-k"},
    "selective": {"activation_checkpoint": "selective"},
    "activations-offloaded": {"activation_checkpoint": "offload"},
}
INDUCTOR = {"compile.enabled": "true"}
COMPILED = {"compile.enabled": "true", "compile.backend": "aot_eager"}


def _one_process() -> dict[str, Case]:
    cases = {f"one-{name}": Case(world=1, leaves=ac) for name, ac in CHECKPOINTING.items()}
    cases["one-accumulated-4"] = Case(world=1, leaves=FOUR, fast=True)
    cases["one-accumulated-16"] = Case(world=1, leaves=ACCUMULATE)
    cases["one-inductor"] = Case(world=1, leaves=INDUCTOR)
    cases["one-memory-budget"] = Case(
        world=1, leaves=INDUCTOR | {"activation_checkpoint": "memory-budget"}
    )
    cases["one-compiled"] = Case(world=1, leaves=COMPILED)
    cases["one-compiled-selective"] = Case(world=1, leaves=COMPILED | CHECKPOINTING["selective"])
    for model in ("moe", "deepseek"):
        cases[f"{model}-one-accumulated-4"] = Case(world=1, model=model, leaves=FOUR, fast=True)
        cases[f"{model}-one-full"] = Case(world=1, model=model, leaves=CHECKPOINTING["full"])
    return cases


def _two() -> dict[str, Case]:
    tp2, fsdp2 = _mesh(tp=2), _mesh(dp_shard=2)
    cases = {
        "ddp2": Case(world=2, leaves=_mesh(dp_replicate=2)),
        "fsdp2": Case(world=2, leaves=fsdp2, fast=True),
        "fsdp2-accumulated-4": Case(world=2, leaves=fsdp2 | TWO),
        "fsdp2-reduced-once": Case(
            world=2, leaves=fsdp2 | TWO | {"parallel.sync_every_microbatch": "false"}
        ),
        "fsdp2-kept": Case(
            world=2, leaves=fsdp2 | TWO | {"parallel.reshard_after_forward": "false"}
        ),
        "fsdp2-offloaded": Case(world=2, leaves=fsdp2 | {"parallel.cpu_offload": "true"}),
        "fsdp2-prefetch-2": Case(world=2, leaves=fsdp2 | {"parallel.prefetch": "2"}),
        "fsdp2-compiled": Case(world=2, leaves=fsdp2 | COMPILED),
        "fsdp2-compiled-offloaded": Case(
            world=2, leaves=fsdp2 | COMPILED | CHECKPOINTING["activations-offloaded"]
        ),
        "fsdp2-inductor": Case(world=2, leaves=fsdp2 | INDUCTOR),
        "tp2-inductor": Case(world=2, leaves=tp2 | INDUCTOR),
        "tp2-compiled-selective": Case(world=2, leaves=tp2 | COMPILED | CHECKPOINTING["selective"]),
        "tp2": Case(world=2, leaves=tp2, fast=True),
        "tp2-tied": Case(world=2, model="tied", leaves=tp2),
        "tp2-accumulated-4": Case(world=2, leaves=tp2 | FOUR),
        "tp2-asynchronous": Case(
            world=2, leaves=tp2 | {"parallel.asynchronous_tp": "true"}, fast=True
        ),
        "tp2-compiled": Case(world=2, leaves=tp2 | COMPILED, fast=True),
        "pp2-tied": Case(world=2, model="tied", leaves=_mesh(pp=2) | FOUR, fast=True),
        "pp2-uneven": Case(
            world=2, leaves=_mesh(pp=2) | FOUR | {"parallel.stage_layers": "[5, 3]"}
        ),
        "pp2-compiled": Case(world=2, leaves=_mesh(pp=2) | FOUR | COMPILED),
        "moe-fsdp2": Case(world=2, model="moe", leaves=fsdp2),
        "moe-ep2": Case(world=2, model="moe", leaves=fsdp2 | {"parallel.ep": "2"}, fast=True),
        "moe-ep2-full": Case(
            world=2, model="moe", leaves=fsdp2 | {"parallel.ep": "2"} | CHECKPOINTING["full"]
        ),
        "moe-ep2-selective": Case(
            world=2, model="moe", leaves=fsdp2 | {"parallel.ep": "2"} | CHECKPOINTING["selective"]
        ),
        "moe-ep2-compiled": Case(
            world=2, model="moe", leaves=fsdp2 | {"parallel.ep": "2"} | COMPILED
        ),
        "moe-tp2": Case(world=2, model="moe", leaves=tp2),
        "moe-tp2-ep2": Case(world=2, model="moe", leaves=tp2 | {"parallel.ep": "2"}, fast=True),
        "moe-tp2-ep2-accumulated-4": Case(
            world=2, model="moe", leaves=tp2 | FOUR | {"parallel.ep": "2"}
        ),
        "moe-tp2-expert-tp2": Case(world=2, model="moe", leaves=tp2 | {"parallel.expert_tp": "2"}),
        "moe-pp2": Case(world=2, model="moe", leaves=_mesh(pp=2) | FOUR),
        "moe-pp2-zbv-full": Case(
            world=2,
            model="moe",
            leaves=_mesh(pp=2)
            | FOUR
            | CHECKPOINTING["full"]
            | {"parallel.schedule": "ZBVZeroBubble"},
            fast=True,
        ),
        "deepseek-pp2-zbv": Case(
            world=2,
            model="deepseek",
            leaves=_mesh(pp=2) | FOUR | {"parallel.schedule": "ZBVZeroBubble"},
        ),
        "pp2-csv": Case(world=2, leaves=_mesh(pp=2) | FOUR | {"parallel.schedule": str(TABLE)}),
        "moe-cp2": Case(world=2, model="moe", leaves=_mesh(cp=2)),
        "deepseek-ep2": Case(world=2, model="deepseek", leaves=fsdp2 | {"parallel.ep": "2"}),
        "deepseek-ahead-tp2": Case(world=2, model="deepseek-ahead", leaves=tp2 | FOUR),
        "deepseek-ahead-ep2": Case(
            world=2, model="deepseek-ahead", leaves=fsdp2 | {"parallel.ep": "2"} | TWO, fast=True
        ),
        "deepseek-tp2": Case(world=2, model="deepseek", leaves=tp2, fast=True),
        "deepseek-cp2-ring": Case(world=2, model="deepseek", leaves=_mesh(cp=2) | CONTEXTS["ring"]),
        "gpt-oss-tp2": Case(world=2, model="gpt-oss", leaves=tp2),
        "gpt-oss-cp2": Case(world=2, model="gpt-oss", leaves=_mesh(cp=2)),
        "gpt-oss-ep2": Case(world=2, model="gpt-oss", leaves=fsdp2 | {"parallel.ep": "2"}),
    }
    for name, schedule in SCHEDULES.items():
        leaves = _mesh(pp=2) | FOUR | {"parallel.schedule": schedule}
        cases[f"pp2-{name}"] = Case(world=2, leaves=leaves, fast=name in ("1f1b", "zbv"))
        if name in ("interleaved-zero-bubble", "zbv", "dual-pipe-v"):
            cases[f"moe-pp2-{name}"] = Case(world=2, model="moe", leaves=leaves)
    for name, context in CONTEXTS.items():
        fast = name in ("ring", "ulysses")
        cases[f"cp2-{name}"] = Case(world=2, leaves=_mesh(cp=2) | context, fast=fast)
    for name, ac in CHECKPOINTING.items():
        cases[f"fsdp2-{name}"] = Case(world=2, leaves=fsdp2 | ac, fast=name == "full")
        cases[f"tp2-{name}"] = Case(world=2, leaves=tp2 | ac)
    return cases


def _four() -> dict[str, Case]:
    cases = {
        "fsdp4": Case(world=4, leaves=_mesh(dp_shard=4)),
        "hsdp2x2": Case(world=4, leaves=_mesh(dp_replicate=2, dp_shard=2)),
        "tp4": Case(world=4, leaves=_mesh(tp=4), fast=True),
        "tp4-asynchronous": Case(
            world=4, leaves=_mesh(tp=4) | {"parallel.asynchronous_tp": "true"}
        ),
        "tp2-fsdp2": Case(world=4, leaves=_mesh(tp=2, dp_shard=2), fast=True),
        "tp2-ddp2": Case(world=4, leaves=_mesh(tp=2, dp_replicate=2)),
        "tp2-fsdp2-selective-accumulated": Case(
            world=4, leaves=_mesh(tp=2, dp_shard=2) | TWO | CHECKPOINTING["selective"]
        ),
        "pp2-fsdp2": Case(world=4, leaves=_mesh(pp=2, dp_shard=2) | TWO, fast=True),
        "pp2-fsdp2-zbv": Case(
            world=4,
            leaves=_mesh(pp=2, dp_shard=2) | TWO | {"parallel.schedule": "ZBVZeroBubble"},
        ),
        "pp2-tp2": Case(world=4, leaves=_mesh(pp=2, tp=2) | FOUR),
        "pp2-cp2": Case(world=4, leaves=_mesh(pp=2, cp=2) | FOUR),
        "pp4": Case(world=4, leaves=_mesh(pp=4) | TWO),
        "pp4-interleaved-1f1b": Case(
            world=4, leaves=_mesh(pp=4) | TWO | {"parallel.schedule": "Interleaved1F1B"}
        ),
        "cp2-fsdp2": Case(world=4, leaves=_mesh(cp=2, dp_shard=2), fast=True),
        "cp2-tp2": Case(world=4, leaves=_mesh(cp=2, tp=2)),
        "moe-ep4": Case(world=4, model="moe", leaves=_mesh(dp_shard=4, ep=4), fast=True),
        "moe-ep2-fsdp2": Case(world=4, model="moe", leaves=_mesh(dp_shard=4, ep=2), fast=True),
        "moe-ep2-hsdp2x2": Case(
            world=4, model="moe", leaves=_mesh(dp_replicate=2, dp_shard=2, ep=2)
        ),
        "moe-pp2-ep2-zbv-full": Case(
            world=4,
            model="moe",
            leaves=_mesh(pp=2, dp_shard=2, ep=2)
            | TWO
            | CHECKPOINTING["full"]
            | {"parallel.schedule": "ZBVZeroBubble"},
        ),
        "moe-pp2-ep2": Case(world=4, model="moe", leaves=_mesh(pp=2, dp_shard=2, ep=2) | TWO),
        "moe-cp2-ep4": Case(world=4, model="moe", leaves=_mesh(cp=2, dp_shard=2, ep=4)),
        "moe-tp2-fsdp2-ep4": Case(world=4, model="moe", leaves=_mesh(tp=2, dp_shard=2, ep=4)),
        "moe-tp2-fsdp2-ep2-expert-tp2": Case(
            world=4, model="moe", leaves=_mesh(tp=2, dp_shard=2, ep=2, expert_tp=2)
        ),
        "deepseek-ep2-tp2": Case(world=4, model="deepseek", leaves=_mesh(tp=2, dp_shard=2, ep=2)),
        "deepseek-pp2-ep2": Case(
            world=4, model="deepseek", leaves=_mesh(pp=2, dp_shard=2, ep=2) | TWO
        ),
    }
    for name, context in CONTEXTS.items():
        cases[f"cp4-{name}"] = Case(world=4, leaves=_mesh(cp=4) | context)
    return cases


def _eight() -> dict[str, Case]:
    dense = _mesh(pp=2, dp_shard=2, tp=2) | TWO
    return {
        "pp2-fsdp2-tp2": Case(world=8, leaves=dense, fast=True),
        "pp2-fsdp2-tp2-interleaved": Case(
            world=8, leaves=dense | {"parallel.schedule": "Interleaved1F1B"}
        ),
        "cp2-fsdp2-tp2": Case(world=8, leaves=_mesh(cp=2, dp_shard=2, tp=2), fast=True),
        "cp2-fsdp2-tp2-ring": Case(
            world=8, leaves=_mesh(cp=2, dp_shard=2, tp=2) | CONTEXTS["ring"]
        ),
        "pp2-cp2-tp2": Case(world=8, leaves=_mesh(pp=2, cp=2, tp=2) | FOUR),
        "hsdp2x2-tp2": Case(world=8, leaves=_mesh(dp_replicate=2, dp_shard=2, tp=2)),
        "moe-pp2-cp2-ep2": Case(
            world=8, model="moe", leaves=_mesh(pp=2, cp=2, dp_shard=2, ep=2) | TWO, fast=True
        ),
        "moe-ep8": Case(world=8, model="moe", leaves=_mesh(dp_shard=8, ep=8)),
        "moe-pp2-tp2-fsdp2-ep4": Case(
            world=8, model="moe", leaves=_mesh(pp=2, tp=2, dp_shard=2, ep=4) | TWO
        ),
    }


CASES: dict[str, Case] = _one_process() | _two() | _four() | _eight()
