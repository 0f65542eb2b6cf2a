"""DeepSeek-V2 and V3. (arXiv 2405.04434 and 2412.19437)"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from armillary.foundation.component import component
from armillary.foundation.errors import Problem
from armillary.models.config import Refusal
from armillary.models.moe import MoEDecoder
from armillary.models.rope_scaling import YarnRopeScaling
from armillary.models.routing import RouterConfig
from armillary.models.sizes import named

if TYPE_CHECKING:
    from torch import nn

    from armillary.models.decoder import Decoder
    from armillary.models.layers.block import Block
    from armillary.models.multi_token import AheadBlock


@component("deepseek")
@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSeek(MoEDecoder):
    """Latent attention, shared and routed experts, and in training a look one token further."""

    vocab_size: int = 129_280
    """Rows of the embedding, V; at least the tokenizer's."""
    dim: int = 256
    """Width of the residual stream, D."""
    n_kv_heads: int = 8
    """Key and value heads, K: as many as n_heads, since a latent is expanded for every head."""
    norm_eps: float = 1e-6
    """Added to the mean square in norms."""
    rope_theta: float = 10_000.0
    """Base of the rotary wavelengths."""
    query_rank: int | None = None
    """Width of the latent that queries are expanded from; none: they are projected directly."""
    key_value_rank: int = 64
    """Width of the latent that keys and values are expanded from."""
    plain_head_dim: int = 32
    """Width of a head's part that is not rotated."""
    rope_head_dim: int = 16
    """Width of a head's rotated part, whose key is one for all heads."""
    value_head_dim: int = 32
    """Width of a head's value, P_v."""
    n_shared_experts: int = 1
    """Experts that every token uses; they are one feed-forward of so many times expert_dim."""
    n_dense_layers: int = 1
    """First layers that have a feed-forward of width ffn_dim instead of experts."""
    predict_ahead: bool = False
    """Whether training also predicts the token after the next, with one more block."""
    router: RouterConfig = field(
        default_factory=lambda: RouterConfig(
            score="sigmoid", scale=2.5, balance_rate=1e-3, sequence_loss=1e-4
        )
    )
    """How experts are chosen and kept evenly loaded."""

    @property
    def head_width(self) -> int:
        """P, of queries and keys."""
        return self.plain_head_dim + self.rope_head_dim

    @property
    def rotated_width(self) -> int:
        """How much of a head's width is rotated."""
        return self.rope_head_dim

    def build(self) -> Decoder:
        """See `ModelConfig.build`."""
        from armillary.models.multi_token import MultiTokenDecoder

        if not self.predict_ahead:
            return super(DeepSeek, self).build()
        return MultiTokenDecoder(ahead=self._build_ahead(), **self.build_parts())

    def _build_ahead(self) -> AheadBlock:
        from armillary.models.layers.linear import Linear
        from armillary.models.layers.norm import RMSNorm
        from armillary.models.multi_token import AheadBlock

        block: Block = self.build_block(self.n_layers)  # type: ignore[assignment]
        return AheadBlock(
            hidden_norm=RMSNorm(self.dim, eps=self.norm_eps),
            embedding_norm=RMSNorm(self.dim, eps=self.norm_eps),
            projection=Linear(2 * self.dim, self.dim, std=self.init_std),
            block=block,
            norm=RMSNorm(self.dim, eps=self.norm_eps),
        )

    def build_attention(self, index: int) -> nn.Module:
        """See `DenseDecoder.build_attention`."""
        from armillary.models.layers.mla import LatentAttention

        scaling = self.rope_scaling
        return LatentAttention(
            self.dim,
            n_heads=self.n_heads,
            query_rank=self.query_rank,
            key_value_rank=self.key_value_rank,
            plain_head_dim=self.plain_head_dim,
            rope_head_dim=self.rope_head_dim,
            value_head_dim=self.value_head_dim,
            norm_eps=self.norm_eps,
            std=self.init_std,
            output_std=self.output_std(index),
            backend=self.attention,
            score_factor=1.0 if scaling is None else scaling.score_factor,
        )

    def attention_parameters(self) -> int:
        """See `DenseDecoder.attention_parameters`."""
        heads = self.n_heads
        query = heads * self.head_width
        rank = self.query_rank
        queries = self.dim * query if rank is None else rank * (self.dim + query)
        latent = self.dim * (self.key_value_rank + self.rope_head_dim)
        expansion = self.key_value_rank * heads * (self.plain_head_dim + self.value_head_dim)
        return queries + latent + expansion + heads * self.value_head_dim * self.dim

    def norm_parameters(self) -> int:
        """See `DenseDecoder.norm_parameters`."""
        per_block = 2 * self.dim + (self.query_rank or 0) + self.key_value_rank
        ahead = per_block + 3 * self.dim if self.predict_ahead else 0
        return self.n_layers * per_block + self.dim + ahead

    def _matmul_parameters(self, experts: int) -> dict[str, int]:
        counts = super(DeepSeek, self)._matmul_parameters(experts)
        if self.predict_ahead:
            mixture = self.n_experts * self.dim
            mixture += 3 * self.dim * self.expert_dim * (experts + self.n_shared_experts)
            counts["ahead"] = 2 * self.dim**2 + self.attention_parameters() + mixture
        return counts

    def flops_breakdown(self, seq_len: int, *, causal: bool) -> dict[str, float]:
        """See `ModelConfig.flops_breakdown`; looking ahead goes through the head once more."""
        flops = super(DeepSeek, self).flops_breakdown(seq_len, causal=causal)
        if self.predict_ahead:
            flops["head"] *= 2
        return flops

    def score_flops(self, seq_len: int, *, causal: bool) -> float:
        """See `DenseDecoder.score_flops`: keys and values differ in width."""
        layers = self.n_layers + self.predict_ahead
        scores = 6.0 * layers * self.n_heads * (self.head_width + self.value_head_dim) * seq_len
        return scores / 2 if causal else scores

    def divisors(self) -> dict[str, dict[str, int]]:
        """See `ModelConfig.divisors`."""
        found = super(DeepSeek, self).divisors()
        found["tp"].pop("model.n_kv_heads")
        return found

    def refusals(self) -> dict[str, Refusal]:
        """See `ModelConfig.refusals`."""
        if not self.predict_ahead:
            return {}
        why, fix = "model.predict_ahead = true reads", "--no-model.predict-ahead"
        return {
            "pp": Refusal(f"{why} the embedding, of the first stage, in the last", fix),
            "cp": Refusal(f"{why} the next token, which may lie on another rank", fix),
        }

    def device_problems(self, device_type: str, compute_dtype: str = "bfloat16") -> list[Problem]:
        """See `ModelConfig.device_problems`."""
        if self.attention == "varlen" and self.value_head_dim != self.head_width:
            message = "model.attention = varlen needs values as wide as keys"
            return [Problem(message, "auto, blocked, sdpa, flex", "--model.attention auto")]
        return super(DeepSeek, self).device_problems(device_type, compute_dtype)

    def _head_problems(self) -> list[Problem]:
        found = []
        if self.head_dim is not None:
            message = f"model.head_dim = {self.head_dim} has no place in latent attention"
            found.append(Problem(message, "none: heads are plain_head_dim + rope_head_dim wide"))
        if self.n_kv_heads != self.n_heads:
            message = f"model.n_kv_heads = {self.n_kv_heads} is not model.n_heads = {self.n_heads}"
            found.append(Problem(message, f"{self.n_heads}", f"--model.n-kv-heads {self.n_heads}"))
        for name in ("query_rank", "key_value_rank", "plain_head_dim", "value_head_dim"):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(Problem(f"model.{name} = {value} is not positive", "numbers above 0"))
        if self.rope_head_dim < 2 or self.rope_head_dim % 2:
            message = f"model.rope_head_dim = {self.rope_head_dim} cannot be rotated in pairs"
            found.append(Problem(message, "even numbers from 2", "--model.rope-head-dim 64"))
        return found


_V2_YARN = YarnRopeScaling(factor=40.0, table_sharpening=0.707, score_sharpening=0.707)
_V3_YARN = YarnRopeScaling(factor=40.0, table_sharpening=1.0, score_sharpening=1.0)

DEEPSEEK_SIZES = {
    "debug": DeepSeek(
        vocab_size=2048, dim=128, n_layers=4, n_heads=8, n_kv_heads=8, ffn_dim=384,
        max_seq_len=1024, query_rank=64, key_value_rank=32, plain_head_dim=16,
        rope_head_dim=16, value_head_dim=16,
        n_experts=8, n_active=2, expert_dim=64,
        router=RouterConfig(
            score="sigmoid", scale=2.5, n_groups=4, n_top_groups=2, balance_rate=1e-3,
            sequence_loss=1e-4,
        ),
    ),
    "16B": DeepSeek(
        vocab_size=102_400, dim=2048, n_layers=27, n_heads=16, n_kv_heads=16, ffn_dim=10_944,
        max_seq_len=163_840, rope_scaling=_V2_YARN,
        key_value_rank=512, plain_head_dim=128, rope_head_dim=64, value_head_dim=128,
        n_experts=64, n_active=6, expert_dim=1408, n_shared_experts=2,
        router=RouterConfig(normalize=False, sequence_loss=1e-3),
    ),
    "236B": DeepSeek(
        vocab_size=102_400, dim=5120, n_layers=60, n_heads=128, n_kv_heads=128, ffn_dim=12_288,
        max_seq_len=163_840, query_rank=1536, rope_scaling=_V2_YARN,
        key_value_rank=512, plain_head_dim=128, rope_head_dim=64, value_head_dim=128,
        n_experts=160, n_active=6, expert_dim=1536, n_shared_experts=2,
        router=RouterConfig(
            normalize=False, scale=16.0, n_groups=8, n_top_groups=3, group_score="max",
            sequence_loss=1e-3,
        ),
    ),
    "671B": DeepSeek(
        vocab_size=129_280, dim=7168, n_layers=61, n_heads=128, n_kv_heads=128, ffn_dim=18_432,
        max_seq_len=163_840, query_rank=1536, rope_scaling=_V3_YARN,
        key_value_rank=512, plain_head_dim=128, rope_head_dim=64, value_head_dim=128,
        n_experts=256, n_active=8, expert_dim=2048, n_dense_layers=3,
        router=RouterConfig(
            score="sigmoid", scale=2.5, n_groups=8, n_top_groups=4, balance_rate=1e-3,
            sequence_loss=1e-4,
        ),
    ),
}  # fmt: skip
"""Sizes as published (the model cards' config.json): V2-Lite, V2 and V3; and a debug size of ours.

V2's group score is the largest affinity, V3's the sum of the two largest.
"""


def deepseek(size: str) -> DeepSeek:
    """A published size: "16B" (V2-Lite), "236B" (V2), "671B" (V3), or "debug".

    Raises:
        UserError: no such size.
    """
    return named("deepseek", size, DEEPSEEK_SIZES)
