"""Our families against another implementation of the same papers, weight by weight."""

from __future__ import annotations

import re

import pytest
import torch

from armillary.models.decoder import Decoder
from armillary.models.dense import DenseDecoder
from model_cases import FAMILIES, build, random_tokens

NAMES = (
    (r"^embedding\.", "model.embed_tokens."), (r"^norm\.", "model.norm."), (r"^head\.", "lm_head."),
    (r"^layers\.", "model.layers."), (r"\.attention_norm\.", ".input_layernorm."),
    (r"\.feed_forward_norm\.", ".post_attention_layernorm."),
    (r"\.attention\.query_norm\.", ".self_attn.q_norm."),
    (r"\.attention\.key_norm\.", ".self_attn.k_norm."),
    (r"\.attention\.query\.", ".self_attn.q_proj."), (r"\.attention\.key\.", ".self_attn.k_proj."),
    (r"\.attention\.value\.", ".self_attn.v_proj."),
    (r"\.attention\.output\.", ".self_attn.o_proj."),
    (r"\.feed_forward\.(gate|up|down)\.", r".mlp.\1_proj."),
)  # fmt: skip


def renamed(model: Decoder) -> dict[str, torch.Tensor]:
    weights = {}
    for name, weight in model.named_parameters():
        new_name = name
        for ours, theirs in NAMES:
            new_name = re.sub(ours, theirs, new_name)
        weights[new_name] = weight
    return weights


def rope_of(config: DenseDecoder) -> dict[str, object]:
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {
            "rope_type": "llama3", "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_frequency_factor,
            "high_freq_factor": config.rope_scaling.high_frequency_factor,
            "original_max_position_embeddings": config.rope_scaling.original_max_seq_len,
        }  # fmt: skip
    return rope


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_equal_those_of_transformers_for_the_same_weights(family: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = FAMILIES[family]
    kind = "Qwen3" if config.qk_norm else "Llama"
    theirs_config = getattr(transformers, f"{kind}Config")(
        vocab_size=config.vocab_size, hidden_size=config.dim, intermediate_size=config.ffn_dim,
        num_hidden_layers=config.n_layers, num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads, head_dim=config.head_width,
        rms_norm_eps=config.norm_eps, rope_parameters=rope_of(config),
        tie_word_embeddings=config.tied_embeddings, max_position_embeddings=config.max_seq_len,
        attn_implementation="sdpa",
    )  # fmt: skip
    ours = build(config)
    theirs = getattr(transformers, f"{kind}ForCausalLM")(theirs_config).float().eval()
    report = theirs.load_state_dict(renamed(ours), strict=False)
    tied = {"lm_head.weight"} if config.tied_embeddings else set()
    assert (set(report.missing_keys), report.unexpected_keys) == (tied, [])
    tokens = random_tokens(2, 150)  # past the original context of the scaled one
    expected = theirs(tokens).logits
    assert (ours(tokens) - expected).abs().max() <= 1e-5
    assert expected.std() > 0.3
