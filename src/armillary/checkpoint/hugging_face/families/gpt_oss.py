"""GPT-OSS in Hugging Face format: experts stacked, gate and up alternating, MXFP4 or plain.

(Names and shapes: the headers of the published files; arXiv 2508.10925, section 2.1, for MXFP4.)
Plain weights of experts are `[E, inputs, outputs]`, with column 2 i of `gate_up_proj` the gate's
and 2 i + 1 the up's. In MXFP4, rows are outputs and neighbours in a row share a scale.
"""

from __future__ import annotations

from typing import Any

from armillary.checkpoint.hugging_face.facts import Facts, rope_fields
from armillary.checkpoint.hugging_face.families.family import (
    ATTENTION,
    BLOCK,
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
from armillary.checkpoint.hugging_face.source import Source, Sources
from armillary.checkpoint.hugging_face.table import Chain, Rule, Transpose, Weave, rename, renames
from armillary.checkpoint.hugging_face.views import Mxfp4, Transposed
from armillary.foundation.errors import Problem, UserError
from armillary.models.gpt_oss import GptOss
from armillary.models.routing import RouterConfig

_BIASES = {
    ours.replace(".weight", ".bias"): theirs.replace(".weight", ".bias")
    for ours, theirs in ATTENTION.items()
}
_OWN = {
    "attention.core.sinks": "self_attn.sinks",
    "feed_forward.router.weight": "mlp.router.weight",
    "feed_forward.router.bias": "mlp.router.bias",
    "feed_forward.experts.down_bias": "mlp.experts.down_proj_bias",
}
_ALPHA = 1.702
_BLOCKS, _SCALES = "_blocks", "_scales"


def _read(facts: Facts) -> GptOss:
    fields = read_common(facts)
    facts.only("attention_bias", True)
    facts.only("swiglu_alpha", _ALPHA)
    kinds = ("sliding_attention", "full_attention")
    expected = [kinds[index % 2] for index in range(min(fields["n_layers"], 10_000))]
    if facts.plain("layer_types", expected) != expected:
        facts.refuse("layer_types is not windowed and full in turn", "sliding_attention first")
    theta, scaling = facts.rope(150_000.0)
    width = facts.integer("intermediate_size")
    active = facts.optional("num_experts_per_tok") or facts.integer("experts_per_token", 4)
    return GptOss(
        **fields,
        **read_heads(facts, fields),
        ffn_dim=width,
        expert_dim=width,
        n_experts=facts.integer("num_local_experts", most=MOST_EXPERTS),
        n_active=active,
        window=facts.integer("sliding_window", 128),
        gate_limit=facts.number("swiglu_limit", 7.0),
        rope_theta=theta,
        rope_scaling=facts.yarn(scaling, fields["max_seq_len"]),
        router=RouterConfig(bias=True, sequence_loss=SEQUENCE_LOSS),
    )


def _write(model: GptOss) -> dict[str, Any]:
    kinds = ("full_attention", "sliding_attention")
    windows = [model.layer_window(index) is not None for index in range(model.n_layers)]
    own = {
        "head_dim": model.head_width,
        "intermediate_size": model.expert_dim,
        "max_position_embeddings": stretched_context(model),
        "attention_bias": True,
        "num_local_experts": model.n_experts,
        "num_experts_per_tok": model.n_active,
        "experts_per_token": model.n_active,
        "sliding_window": model.window,
        "layer_types": [kinds[windowed] for windowed in windows],
        "swiglu_limit": model.gate_limit,
        "output_router_logits": False,
        "router_aux_loss_coef": model.router.sequence_loss,
    }
    return write_common(model) | rope_fields(model.rope_theta, model.rope_scaling) | own


def _refusals(model: GptOss) -> list[Problem]:
    return different(
        model,
        n_shared_experts=0,
        n_dense_layers=0,
        router__score="softmax",
        router__normalize=True,
        router__scale=1.0,
        router__n_groups=1,
        router__bias=True,
        router__balance_rate=0.0,
    )


def _rules(model: GptOss, config: Config) -> list[Rule]:
    rules = outer(model)
    for index in range(model.n_layers):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        rules += renames(ours, theirs, BLOCK | ATTENTION | _BIASES | _OWN)
        own, other = f"{ours}.feed_forward.experts", f"{theirs}.mlp.experts"
        rules += [
            Rule(
                (f"{own}.gate", f"{own}.up"),
                (f"{other}.gate_up_proj",),
                Chain((Transpose(), Weave(2, dim=1))),
            ),
            Rule(
                (f"{own}.gate_bias", f"{own}.up_bias"),
                (f"{other}.gate_up_proj_bias",),
                Weave(2, dim=1),
            ),
            rename(f"{own}.down", f"{other}.down_proj", Transpose()),
        ]
    return rules


def _unpack(theirs: Sources, config: Config) -> dict[str, Source]:
    """MXFP4 to numbers; its rows are outputs, and those of plain weights are inputs."""
    found: dict[str, Source] = {}
    for name, source in theirs.items():
        if name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in theirs:
            continue
        if not name.endswith(_BLOCKS):
            found[name] = source
            continue
        plain = name.removesuffix(_BLOCKS)
        scales = theirs.get(plain + _SCALES)
        packed = source.shape
        if scales is None or scales.shape != packed[:-1] or packed[-1:] != (16,):
            message = f"{name} {list(packed)} has no {plain}{_SCALES} that fits"
            raise UserError(Problem(message, "blocks of 16 bytes, and one scale for each"))
        found[plain] = Transposed(Mxfp4(source, scales))
    return found


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    config=GptOss,
    read=_read,
    write=_write,
    rules=_rules,
    refusals=_refusals,
    unpack=_unpack,
    quantised=("mxfp4",),
)
