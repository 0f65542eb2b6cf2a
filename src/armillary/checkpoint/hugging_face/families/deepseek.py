"""DeepSeek-V2 and V3 in Hugging Face format, block-scaled float8 and the extra layer included.

(Names and shapes: the headers of the published files; arXiv 2412.19437, sections 2.2 and 3.3.)
Published rotated pairs are neighbours, ours are halves: rows of queries and of the shared key are
permuted, unless config.json says `rope_interleave: false` (V3 only). The extra layer that predicts
the token after the next reads [embedding; hidden] there, [hidden; embedding] here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from armillary.checkpoint.hugging_face.facts import Facts, rope_fields
from armillary.checkpoint.hugging_face.families.family import (
    BLOCK,
    FEED_FORWARD,
    MOST_EXPERTS,
    WIDEST_HEAD,
    Family,
    different,
    is_rotary_table,
    outer,
    read_common,
    stretched_context,
    write_common,
)
from armillary.checkpoint.hugging_face.families.qwen3_moe import expert_rules
from armillary.checkpoint.hugging_face.files import Config
from armillary.checkpoint.hugging_face.source import Source, Sources
from armillary.checkpoint.hugging_face.table import SAME, Reorder, Rule, rename, renames
from armillary.checkpoint.hugging_face.views import Float8Blocks, halves_of_pairs
from armillary.foundation.errors import Problem, UserError
from armillary.models.deepseek import DeepSeek
from armillary.models.routing import RouterConfig

_LATENT = {
    "attention.key_value_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention.key_value.weight": "self_attn.kv_b_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
}
_QUERY_LATENT = {
    "attention.query_latent.weight": "self_attn.q_a_proj.weight",
    "attention.query_norm.weight": "self_attn.q_a_layernorm.weight",
}
_SHARED = {
    f"feed_forward.shared.{name}.weight": f"mlp.shared_experts.{name}_proj.weight"
    for name in ("gate", "up", "down")
}
_AHEAD = {
    "embedding_norm.weight": "enorm.weight",
    "hidden_norm.weight": "hnorm.weight",
    "norm.weight": "shared_head.norm.weight",
}
_AHEAD_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""What the extra layer has again, and shares with the model (section 2.2)."""
_BALANCE_RATE = 1e-3
"""Speed of the selection biases (arXiv 2412.19437, section 4.2); no config.json has it."""
_PUBLISHED_LAYERS = 61
_SCALE, _BLOCK = "_scale_inv", [128, 128]
_V2_METHODS = ("greedy", "group_limited_greedy")


def _read_latent(facts: Facts) -> dict[str, Any]:
    fields = read_common(facts)
    facts.only("attention_bias", False)
    facts.only("mlp_bias", False)
    facts.only("sliding_window", None)
    facts.only("num_key_value_heads", fields["n_heads"])
    facts.only("moe_layer_freq", 1)
    facts.plain("head_dim")  # others derive it, and ours follows from the two parts
    theta, scaling = facts.rope(10_000.0)
    return fields | {
        "n_kv_heads": fields["n_heads"],
        "query_rank": facts.optional("q_lora_rank"),
        "key_value_rank": facts.integer("kv_lora_rank", most=WIDEST_HEAD),
        "plain_head_dim": facts.integer("qk_nope_head_dim", most=WIDEST_HEAD),
        "rope_head_dim": facts.integer("qk_rope_head_dim", most=WIDEST_HEAD),
        "value_head_dim": facts.integer("v_head_dim"),
        "ffn_dim": facts.integer("intermediate_size"),
        "expert_dim": facts.integer("moe_intermediate_size"),
        "n_experts": facts.integer("n_routed_experts", most=MOST_EXPERTS),
        "n_shared_experts": facts.integer("n_shared_experts", 0, most=MOST_EXPERTS),
        "n_active": facts.integer("num_experts_per_tok"),
        "n_dense_layers": facts.integer("first_k_dense_replace", 0),
        "rope_theta": theta,
        "rope_scaling": facts.yarn(scaling, fields["max_seq_len"]),
    }


def _read_v3(facts: Facts) -> DeepSeek:
    facts.only("scoring_func", "sigmoid")
    facts.only("topk_method", "noaux_tc")
    router = RouterConfig(
        score="sigmoid",
        normalize=facts.flag("norm_topk_prob", True),
        scale=facts.number("routed_scaling_factor", 2.5),
        n_groups=facts.integer("n_group", 8),
        n_top_groups=facts.integer("topk_group", 4),
        balance_rate=_BALANCE_RATE,
        sequence_loss=facts.number("aux_loss_alpha", 1e-4),
    )
    return DeepSeek(**_read_latent(facts), router=router)


def _read_v2(facts: Facts) -> DeepSeek:
    facts.only("scoring_func", "softmax")
    facts.only("topk_method", *_V2_METHODS)
    facts.only("norm_topk_prob", False)
    grouped = facts.plain("topk_method", "greedy") == "group_limited_greedy"
    router = RouterConfig(
        normalize=False,
        scale=facts.number("routed_scaling_factor", 1.0),
        n_groups=facts.integer("n_group", 1) if grouped else 1,
        n_top_groups=facts.integer("topk_group", 1) if grouped else 1,
        group_score="max" if grouped else "top-2",
        sequence_loss=facts.number("aux_loss_alpha", 1e-3),
    )
    for name in ("n_group", "topk_group"):
        facts.plain(name)
    return DeepSeek(**_read_latent(facts), router=router)


def _write_latent(model: DeepSeek) -> dict[str, Any]:
    own = {
        "max_position_embeddings": stretched_context(model),
        "attention_bias": False,
        "q_lora_rank": model.query_rank,
        "kv_lora_rank": model.key_value_rank,
        "qk_nope_head_dim": model.plain_head_dim,
        "qk_rope_head_dim": model.rope_head_dim,
        "v_head_dim": model.value_head_dim,
        "moe_intermediate_size": model.expert_dim,
        "n_routed_experts": model.n_experts,
        "n_shared_experts": model.n_shared_experts,
        "num_experts_per_tok": model.n_active,
        "first_k_dense_replace": model.n_dense_layers,
        "moe_layer_freq": 1,
        "routed_scaling_factor": model.router.scale,
        "norm_topk_prob": model.router.normalize,
        "n_group": model.router.n_groups,
        "topk_group": model.router.n_top_groups,
        "aux_loss_alpha": model.router.sequence_loss,
    }
    return write_common(model) | rope_fields(model.rope_theta, model.rope_scaling) | own


def _write_v3(model: DeepSeek) -> dict[str, Any]:
    return _write_latent(model) | {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_interleave": True,
        "num_nextn_predict_layers": int(model.predict_ahead),
    }


def _write_v2(model: DeepSeek) -> dict[str, Any]:
    grouped = model.router.n_groups > 1
    method = "group_limited_greedy" if grouped else "greedy"
    return _write_latent(model) | {"scoring_func": "softmax", "topk_method": method}


def _refusals_v3(model: DeepSeek) -> list[Problem]:
    found = different(model, router__score="sigmoid", router__bias=False)
    if model.router.balance_rate <= 0:
        found += different(model, router__balance_rate=_BALANCE_RATE)
    if model.router.n_groups > 1:
        found += different(model, router__group_score="top-2")
    return found


def _refusals_v2(model: DeepSeek) -> list[Problem]:
    found = different(
        model,
        predict_ahead=False,
        router__score="softmax",
        router__normalize=False,
        router__bias=False,
        router__balance_rate=0.0,
    )
    if model.router.n_groups > 1:
        found += different(model, router__group_score="max")
    return found


def _attention(model: DeepSeek, ours: str, theirs: str, *, paired: bool) -> list[Rule]:
    """Latent attention; `paired`: rotated pairs are neighbours on their side."""
    rules = renames(ours, theirs, _LATENT | (_QUERY_LATENT if model.query_rank else {}))
    query = "q_b_proj" if model.query_rank else "q_proj"
    rotated = model.rope_head_dim
    by_head = halves_of_pairs(model.n_heads, model.plain_head_dim, rotated)
    shared = halves_of_pairs(1, model.key_value_rank, rotated)
    names = {
        ("query", query): by_head,
        ("key_value_latent", "kv_a_proj_with_mqa"): shared,
    }
    for (own, other), order in names.items():
        transform = Reorder(order) if paired else SAME
        own_name = f"{ours}.attention.{own}.weight"
        rules.append(rename(own_name, f"{theirs}.self_attn.{other}.weight", transform))
    return rules


def _mixture(model: DeepSeek, ours: str, theirs: str) -> list[Rule]:
    """Router, experts, and the one that all tokens use."""
    rules = [rename(f"{ours}.feed_forward.router.weight", f"{theirs}.mlp.gate.weight")]
    if model.router.balance_rate > 0:
        own = f"{ours}.feed_forward.router.expert_bias"
        rules.append(rename(own, f"{theirs}.mlp.gate.e_score_correction_bias"))
    if model.n_shared_experts:
        rules += renames(ours, theirs, _SHARED)
    return rules + expert_rules(model, f"{ours}.feed_forward", f"{theirs}.mlp")


def _rules(model: DeepSeek, config: Config) -> list[Rule]:
    paired = config.get("model_type") == "deepseek_v2" or config.get("rope_interleave") is not False
    rules = outer(model)
    for index in range(model.n_layers + model.predict_ahead):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        rules += renames(ours, theirs, BLOCK)
        rules += _attention(model, ours, theirs, paired=paired)
        dense = index < model.n_dense_layers
        rules += renames(ours, theirs, FEED_FORWARD) if dense else _mixture(model, ours, theirs)
    if model.predict_ahead:
        ours, theirs = f"layers.{model.n_layers}", f"model.layers.{model.n_layers}"
        halves = torch.arange(2 * model.dim).roll(model.dim)
        rules += renames(ours, theirs, _AHEAD)
        swapped = Reorder(halves, dim=1)
        rules.append(rename(f"{ours}.projection.weight", f"{theirs}.eh_proj.weight", swapped))
    return rules


def _unpack(theirs: Sources, config: Config) -> dict[str, Source]:
    """Float8 weights times the factors of their blocks."""
    quantised = config.get("quantization_config") or {}
    side = quantised.get("weight_block_size", _BLOCK) if isinstance(quantised, dict) else None
    if side != _BLOCK:
        message = f"config.json: quantization_config.weight_block_size is {str(side)[:80]}"
        raise UserError(Problem(message, str(_BLOCK)))
    found: dict[str, Source] = {}
    for name, source in theirs.items():
        if name.endswith(_SCALE) and name.removesuffix(_SCALE) in theirs:
            continue
        scale = theirs.get(name + _SCALE)
        if scale is None:
            found[name] = source
            continue
        blocks = tuple(-(-size // n) for size, n in zip(source.shape, _BLOCK, strict=False))
        if len(source.shape) != 2 or scale.shape != blocks:
            message = f"{name}{_SCALE} {list(scale.shape)} does not fit {list(source.shape)}"
            raise UserError(
                Problem(message, f"one factor for each block of {_BLOCK}: {list(blocks)}")
            )
        found[name] = Float8Blocks(source, scale)
    return found


def _loadable(model: DeepSeek) -> DeepSeek:
    """transformers passes over the extra layer by its number in the published model, and no other;
    `_keys_to_ignore_on_load_unexpected` of its DeepseekV3PreTrainedModel, in 5.24."""
    return model if model.n_layers == _PUBLISHED_LAYERS else replace(model, predict_ahead=False)


def _left_out(name: str, model: DeepSeek) -> str | None:
    """The extra layer where the model has none, and its copies of what is shared."""
    ahead = f"model.layers.{model.n_layers}."
    if name.startswith(ahead):
        if not model.predict_ahead:
            return "predicts the token after the next: --model.predict-ahead reads it"
        if name.removeprefix(ahead) in _AHEAD_COPIES:
            return "is the model's own embedding or head once more"
    return is_rotary_table(name, model)


DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    config=DeepSeek,
    read=_read_v3,
    write=_write_v3,
    rules=_rules,
    refusals=_refusals_v3,
    unpack=_unpack,
    quantised=("fp8",),
    loadable=_loadable,
    left_out=_left_out,
)
DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    config=DeepSeek,
    read=_read_v2,
    write=_write_v2,
    rules=_rules,
    refusals=_refusals_v2,
    left_out=_left_out,
)
