"""Qwen3, mixtures of experts, in Hugging Face format: each expert's matrices by themselves.

(Names and shapes: the headers of the published files.)
"""

from __future__ import annotations

from typing import Any

from armillary.checkpoint.hugging_face.facts import Facts, rope_fields
from armillary.checkpoint.hugging_face.families.family import (
    ATTENTION,
    BLOCK,
    FEED_FORWARD,
    HEAD_NORMS,
    MOST_EXPERTS,
    SEQUENCE_LOSS,
    Family,
    different,
    outer,
    read_common,
    read_heads,
    stretched_context,
    write_common,
)
from armillary.checkpoint.hugging_face.files import Config
from armillary.checkpoint.hugging_face.table import Rule, Stack, rename, renames
from armillary.foundation.errors import Problem
from armillary.models.moe import MoEDecoder
from armillary.models.qwen3_moe import Qwen3MoE
from armillary.models.routing import RouterConfig


def expert_rules(model: MoEDecoder, ours: str, theirs: str) -> list[Rule]:
    """Stacked experts of ours to one matrix each of theirs."""
    return [
        Rule(
            (f"{ours}.experts.{name}",),
            tuple(
                f"{theirs}.experts.{expert}.{name}_proj.weight" for expert in range(model.n_experts)
            ),
            Stack(),
        )
        for name in ("gate", "up", "down")
    ]


def _read(facts: Facts) -> Qwen3MoE:
    fields = read_common(facts)
    facts.only("attention_bias", False)
    facts.only("use_sliding_window", False)
    facts.only("decoder_sparse_step", 1)
    dense = facts.plain("mlp_only_layers", [])
    n_dense = len(dense) if isinstance(dense, list) else -1
    if dense != list(range(n_dense)):
        facts.refuse(f"mlp_only_layers is {str(dense)[:80]}", "the first layers, in order")
    theta, scaling = facts.rope(10_000.0)
    experts = "num_experts" if facts.plain("num_experts") is not None else "num_local_experts"
    return Qwen3MoE(
        **fields,
        **read_heads(facts, fields),
        ffn_dim=facts.integer("intermediate_size"),
        expert_dim=facts.integer("moe_intermediate_size"),
        n_experts=facts.integer(experts, most=MOST_EXPERTS),
        n_active=facts.integer("num_experts_per_tok"),
        n_dense_layers=max(n_dense, 0),
        rope_theta=theta,
        rope_scaling=facts.yarn(scaling, fields["max_seq_len"]),
        router=RouterConfig(
            normalize=facts.flag("norm_topk_prob", False), sequence_loss=SEQUENCE_LOSS
        ),
    )


def _write(model: Qwen3MoE) -> dict[str, Any]:
    own = {
        "head_dim": model.head_width,
        "max_position_embeddings": stretched_context(model),
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "moe_intermediate_size": model.expert_dim,
        "num_experts": model.n_experts,
        "num_experts_per_tok": model.n_active,
        "mlp_only_layers": list(range(model.n_dense_layers)),
        "decoder_sparse_step": 1,
        "norm_topk_prob": model.router.normalize,
        "output_router_logits": False,
        "router_aux_loss_coef": model.router.sequence_loss,
    }
    return write_common(model) | rope_fields(model.rope_theta, model.rope_scaling) | own


def _refusals(model: Qwen3MoE) -> list[Problem]:
    return different(
        model,
        n_shared_experts=0,
        router__score="softmax",
        router__scale=1.0,
        router__n_groups=1,
        router__bias=False,
        router__balance_rate=0.0,
    )


def _rules(model: Qwen3MoE, config: Config) -> list[Rule]:
    rules = outer(model)
    for index in range(model.n_layers):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        rules += renames(ours, theirs, BLOCK | ATTENTION | HEAD_NORMS)
        if index < model.n_dense_layers:
            rules += renames(ours, theirs, FEED_FORWARD)
            continue
        rules.append(rename(f"{ours}.feed_forward.router.weight", f"{theirs}.mlp.gate.weight"))
        rules += expert_rules(model, f"{ours}.feed_forward", f"{theirs}.mlp")
    return rules


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    config=Qwen3MoE,
    read=_read,
    write=_write,
    rules=_rules,
    refusals=_refusals,
)
