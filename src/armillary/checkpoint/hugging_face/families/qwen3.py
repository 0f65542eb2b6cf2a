"""Qwen3, dense, in Hugging Face format. (Names and shapes: the headers of the published files.)"""

from __future__ import annotations

from typing import Any

from armillary.checkpoint.hugging_face.facts import Facts, rope_fields
from armillary.checkpoint.hugging_face.families.family import (
    ATTENTION,
    BLOCK,
    FEED_FORWARD,
    HEAD_NORMS,
    Family,
    outer,
    read_common,
    read_heads,
    write_common,
)
from armillary.checkpoint.hugging_face.files import Config
from armillary.checkpoint.hugging_face.table import Rule, renames
from armillary.models.qwen3 import Qwen3


def _read(facts: Facts) -> Qwen3:
    fields = read_common(facts)
    facts.only("attention_bias", False)
    facts.only("use_sliding_window", False)
    _no_windows(facts)
    theta, scaling = facts.rope(10_000.0)
    return Qwen3(
        **fields,
        **read_heads(facts, fields),
        ffn_dim=facts.integer("intermediate_size"),
        rope_theta=theta,
        rope_scaling=facts.llama_scaling(scaling),
    )


def _no_windows(facts: Facts) -> None:
    kinds = facts.plain("layer_types", [])
    if any(kind != "full_attention" for kind in kinds):
        facts.refuse("layer_types has windows", "full_attention in every layer")


def _write(model: Qwen3) -> dict[str, Any]:
    own = {
        "head_dim": model.head_width,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
    }
    return write_common(model) | rope_fields(model.rope_theta, model.rope_scaling) | own


def _rules(model: Qwen3, config: Config) -> list[Rule]:
    rules = outer(model)
    for index in range(model.n_layers):
        names = BLOCK | ATTENTION | HEAD_NORMS | FEED_FORWARD
        rules += renames(f"layers.{index}", f"model.layers.{index}", names)
    return rules


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    config=Qwen3,
    read=_read,
    write=_write,
    rules=_rules,
)
