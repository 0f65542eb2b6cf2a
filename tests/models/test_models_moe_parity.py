"""Our families with experts against another implementation of the same papers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from armillary.models.decoder import Decoder
from armillary.models.moe import MoEDecoder
from model_cases import random_tokens
from moe_cases import MOE_FAMILIES, build_moe

NAMES = (
    (r"^embedding\.", "model.embed_tokens."), (r"^norm\.", "model.norm."), (r"^head\.", "lm_head."),
    (r"^layers\.", "model.layers."), (r"\.attention_norm\.", ".input_layernorm."),
    (r"\.feed_forward_norm\.", ".post_attention_layernorm."), (r"\.attention\.", ".self_attn."),
    (r"\.core\.sinks$", ".sinks"), (r"\.feed_forward\.(gate|up|down)\.", r".mlp.\1_proj."),
    (r"\.feed_forward\.shared\.(gate|up|down)\.", r".mlp.shared_experts.\1_proj."),
    (r"\.router\.expert_bias$", ".gate.e_score_correction_bias"),
    (r"\.feed_forward\.", ".mlp."),
)  # fmt: skip
GROUPED = (
    (r"\.query_norm\.", ".q_norm."), (r"\.key_norm\.", ".k_norm."), (r"\.query\.", ".q_proj."),
    (r"\.key\.", ".k_proj."), (r"\.value\.", ".v_proj."), (r"\.output\.", ".o_proj."),
)  # fmt: skip
LATENT = (
    (r"\.query_latent\.", ".q_a_proj."), (r"\.query_norm\.", ".q_a_layernorm."),
    (r"\.key_value_latent\.", ".kv_a_proj_with_mqa."),
    (r"\.key_value_norm\.", ".kv_a_layernorm."), (r"\.key_value\.", ".kv_b_proj."),
    (r"\.output\.", ".o_proj."),
)  # fmt: skip


def renamed(model: Decoder, family: str) -> dict[str, torch.Tensor]:
    own = GROUPED if "deepseek" not in family else LATENT
    query = ".q_b_proj." if "v3" in family else ".q_proj."
    router = ".router." if family == "gpt-oss" else ".gate."
    rules = (*NAMES, *own, (r"\.query\.", query), (r"\.router\.", router))
    weights = {}
    for name, weight in model.state_dict().items():
        for ours, theirs in rules:
            name = re.sub(ours, theirs, name)  # noqa: PLW2901  # one rule after the other
        weights[name] = weight
    return fused(weights, interleaved=family == "gpt-oss")


def fused(weights: dict[str, torch.Tensor], *, interleaved: bool) -> dict[str, torch.Tensor]:
    """Gate and up as one tensor, as the other implementation keeps them."""
    out = {name: w for name, w in weights.items() if ".experts." not in name}
    for layer in {name.partition(".experts.")[0] for name in weights if ".experts." in name}:
        own = {k: weights.get(f"{layer}.experts.{k}") for k in ("gate", "up", "down")}
        if not interleaved:
            out[f"{layer}.experts.gate_up_proj"] = torch.cat((own["gate"], own["up"]), dim=1)
            out[f"{layer}.experts.down_proj"] = own["down"]
            continue
        pair = torch.stack((own["gate"], own["up"]), dim=2).flatten(1, 2)  # [E, 2 F, D]
        out[f"{layer}.experts.gate_up_proj"] = pair.mT
        out[f"{layer}.experts.down_proj"] = own["down"].mT
        biases = [weights[f"{layer}.experts.{k}_bias"] for k in ("gate", "up")]
        out[f"{layer}.experts.gate_up_proj_bias"] = torch.stack(biases, dim=2).flatten(1)
        out[f"{layer}.experts.down_proj_bias"] = weights[f"{layer}.experts.down_bias"]
    return out


def rope_of(config: MoEDecoder) -> dict[str, Any]:
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    rope: dict[str, Any] = {
        "rope_type": "yarn", "rope_theta": config.rope_theta, "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_seq_len,
        "beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow,
        "truncate": scaling.truncate,
    }  # fmt: skip
    if scaling.score_sharpening:
        rope["mscale"] = scaling.table_sharpening
        rope["mscale_all_dim"] = scaling.score_sharpening
    return rope


def theirs_for(family: str, config: Any, transformers: Any) -> Any:
    router = config.router
    common = {
        "vocab_size": config.vocab_size, "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers, "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads, "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope_of(config), "tie_word_embeddings": False,
        "max_position_embeddings": config.max_seq_len, "num_experts_per_tok": config.n_active,
    }  # fmt: skip
    if family == "qwen3-moe":
        kind = "Qwen3Moe"
        options = {
            "head_dim": config.head_width, "intermediate_size": config.ffn_dim,
            "moe_intermediate_size": config.expert_dim, "num_experts": config.n_experts,
            "norm_topk_prob": True, "attn_implementation": "sdpa",
        }  # fmt: skip
    elif family == "gpt-oss":
        kind = "GptOss"
        options = {
            "head_dim": config.head_width, "intermediate_size": config.expert_dim,
            "num_local_experts": config.n_experts, "sliding_window": config.window,
            "attn_implementation": "eager",
        }  # fmt: skip
    else:
        kind = "DeepseekV3" if "v3" in family else "DeepseekV2"
        method = {} if "v3" in family else {"topk_method": "group_limited_greedy"}
        options = method | {
            "intermediate_size": config.ffn_dim, "moe_intermediate_size": config.expert_dim,
            "n_routed_experts": config.n_experts, "n_shared_experts": config.n_shared_experts,
            "first_k_dense_replace": config.n_dense_layers, "q_lora_rank": config.query_rank,
            "kv_lora_rank": config.key_value_rank, "qk_nope_head_dim": config.plain_head_dim,
            "qk_rope_head_dim": config.rope_head_dim, "v_head_dim": config.value_head_dim,
            "n_group": router.n_groups, "topk_group": router.n_top_groups,
            "routed_scaling_factor": router.scale, "norm_topk_prob": router.normalize,
            "rope_interleave": False, "attn_implementation": "sdpa",
        }  # fmt: skip
    made = getattr(transformers, f"{kind}Config")(**common, **options)
    return getattr(transformers, f"{kind}ForCausalLM")(made).float().eval()


def paired(weights: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """Rotated rows moved so that neighbours are pairs, as DeepSeek-V2 wants them."""
    width = config.rope_head_dim
    order = torch.arange(width).view(2, -1).T.flatten()
    out = dict(weights)
    for name, weight in weights.items():
        if name.endswith("kv_a_proj_with_mqa.weight"):
            rows = weight.clone()
            rows[-width:] = weight[-width:][order]
            out[name] = rows
        elif name.endswith("q_proj.weight"):
            heads = weight.view(config.n_heads, -1, weight.shape[1]).clone()
            heads[:, -width:] = heads[:, -width:][:, order]
            out[name] = heads.flatten(0, 1)
    return out


@pytest.mark.parametrize("family", MOE_FAMILIES)
@torch.no_grad()
def test_logits_equal_those_of_transformers_for_the_same_weights(family: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = MOE_FAMILIES[family]
    ours, theirs = build_moe(config), theirs_for(family, config, transformers)
    weights = renamed(ours, family)
    if family == "deepseek v2":
        weights = paired(weights, config)
    report = theirs.load_state_dict(weights, strict=False)
    assert (report.missing_keys, report.unexpected_keys) == ([], [])
    tokens = random_tokens(2, 150)  # past the original context
    expected = theirs(tokens).logits
    assert (ours(tokens) - expected).abs().max() <= 3e-5
    assert expected.std() > 0.3
