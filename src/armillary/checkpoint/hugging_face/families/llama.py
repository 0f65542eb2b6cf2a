"""Llama 3, 3.1 and 3.2 in Hugging Face format.

(Names and shapes: the headers of the published meta-llama files. Rotated pairs are the halves of a
head there too: the conversion from Meta's own format, where they are neighbours, is behind it.)
"""

from __future__ import annotations

from typing import Any

from armillary.checkpoint.hugging_face.facts import Facts, rope_fields
from armillary.checkpoint.hugging_face.families.family import (
    ATTENTION,
    BLOCK,
    FEED_FORWARD,
    Family,
    is_rotary_table,
    outer,
    read_common,
    read_heads,
    write_common,
)
from armillary.checkpoint.hugging_face.files import Config
from armillary.checkpoint.hugging_face.table import Rule, renames
from armillary.models.llama import Llama


def _read(facts: Facts) -> Llama:
    fields = read_common(facts)
    facts.only("attention_bias", False)
    facts.only("mlp_bias", False)
    facts.only("sliding_window", None)
    theta, scaling = facts.rope(10_000.0)
    return Llama(
        **fields,
        **read_heads(facts, fields),
        ffn_dim=facts.integer("intermediate_size"),
        rope_theta=theta,
        rope_scaling=facts.llama_scaling(scaling),
    )


def _write(model: Llama) -> dict[str, Any]:
    own = {"head_dim": model.head_width, "attention_bias": False, "mlp_bias": False}
    return write_common(model) | rope_fields(model.rope_theta, model.rope_scaling) | own


def _rules(model: Llama, config: Config) -> list[Rule]:
    rules = outer(model)
    for index in range(model.n_layers):
        names = BLOCK | ATTENTION | FEED_FORWARD
        rules += renames(f"layers.{index}", f"model.layers.{index}", names)
    return rules


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    config=Llama,
    read=_read,
    write=_write,
    rules=_rules,
    left_out=is_rotary_table,
)
