"""Tiny models with experts, one or two of each family, shared by their tests."""

from __future__ import annotations

from dataclasses import replace

import torch

from armillary.models import DeepSeek, GptOss, Qwen3MoE, RouterConfig, YarnRopeScaling
from armillary.models.decoder import Decoder
from armillary.models.moe import MoEDecoder

TINY = {
    "vocab_size": 61, "dim": 32, "n_layers": 3, "n_heads": 4, "ffn_dim": 48, "max_seq_len": 512,
    "n_experts": 8, "n_active": 2, "expert_dim": 24,
}  # fmt: skip
LATENT = {
    "n_kv_heads": 4, "key_value_rank": 16, "plain_head_dim": 8, "rope_head_dim": 8,
    "value_head_dim": 12,
}  # fmt: skip
V3_ROUTER = RouterConfig(
    score="sigmoid", scale=2.5, n_groups=4, n_top_groups=2, balance_rate=1e-3, sequence_loss=1e-4
)
V2_ROUTER = RouterConfig(
    normalize=False, scale=4.0, n_groups=4, n_top_groups=2, group_score="max", sequence_loss=1e-3
)
MOE_FAMILIES: dict[str, MoEDecoder] = {
    "qwen3-moe": Qwen3MoE(**TINY, n_kv_heads=2, head_dim=16),
    "deepseek v3": DeepSeek(
        **TINY, **LATENT, query_rank=24, router=V3_ROUTER,
        rope_scaling=YarnRopeScaling(factor=4.0, original_max_seq_len=64, score_sharpening=1.0),
    ),
    "deepseek v2": DeepSeek(
        **TINY, **LATENT, n_shared_experts=2, router=V2_ROUTER,
        rope_scaling=YarnRopeScaling(
            factor=4.0, original_max_seq_len=64, table_sharpening=0.7, score_sharpening=0.7
        ),
    ),
    "gpt-oss": GptOss(
        **TINY, n_kv_heads=2, head_dim=16, window=20,
        rope_scaling=YarnRopeScaling(factor=8.0, original_max_seq_len=64, truncate=False),
    ),
}  # fmt: skip


def build_moe(config: MoEDecoder, *, attention: str = "auto", seed: int = 0) -> Decoder:
    """The model with weights large enough that every part of it shows in the logits."""
    torch.set_num_threads(1)
    model = replace(config, attention=attention).build()  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            around = 1.0 if "norm" in name else 0.0
            parameter.normal_(around, 0.2, generator=generator)
        for buffer in model.buffers():
            buffer.normal_(0.0, 0.1, generator=generator)
    return model
