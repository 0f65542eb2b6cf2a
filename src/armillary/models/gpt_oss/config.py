"""GPT-OSS. (OpenAI 2025, arXiv 2508.10925, table 1 and section 2)"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from armillary.foundation.component import component
from armillary.foundation.errors import Problem
from armillary.models.moe import MoEDecoder
from armillary.models.rope_scaling import YarnRopeScaling
from armillary.models.routing import RouterConfig
from armillary.models.sizes import named

if TYPE_CHECKING:
    from torch import nn

    from armillary.models.layers.experts import Experts


def _yarn() -> YarnRopeScaling:
    return YarnRopeScaling(factor=32.0, truncate=False)


@component("gpt-oss")
@dataclass(frozen=True, kw_only=True, slots=True)
class GptOss(MoEDecoder):
    """Attention with sinks, windowed and full in turn; experts with a clamped gate; biases."""

    rope_theta: float = 150_000.0
    """Base of the rotary wavelengths."""
    rope_scaling: YarnRopeScaling | None = field(default_factory=_yarn)
    """Stretching of rotary positions to a longer context; none: off."""
    max_seq_len: int = 131_072
    """Longest row the model is meant for, in tokens."""
    window: int = 128
    """Keys that a query sees at most, its own included, in the layers 0, 2, 4, ... (tokens)."""
    gate_limit: float = 7.0
    """Where gate (above) and up (both sides) are cut before they are multiplied."""
    router: RouterConfig = field(
        default_factory=lambda: RouterConfig(bias=True, sequence_loss=1e-3)
    )
    """How experts are chosen and kept evenly loaded."""

    def layer_window(self, index: int) -> int | None:
        """Window of block `index`; None: it sees all keys before it."""
        return self.window if index % 2 == 0 else None

    def build_attention(self, index: int) -> nn.Module:
        """See `DenseDecoder.build_attention`."""
        from armillary.models.gpt_oss.attention import SinkAttention

        return SinkAttention(
            self.dim,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_width,
            std=self.init_std,
            output_std=self.output_std(index),
            backend=self.attention,
            window=self.layer_window(index),
        )

    def build_experts(self, index: int) -> Experts:
        """See `MoEDecoder.build_experts`."""
        from functools import partial

        from armillary.models.layers.experts import Experts, clamped_swiglu

        return Experts(
            self.dim,
            self.expert_dim,
            n_experts=self.n_experts,
            std=self.init_std,
            output_std=self.output_std(index),
            bias=True,
            activation=partial(clamped_swiglu, limit=self.gate_limit),
        )

    def bias_parameters(self, experts: int) -> int:
        """See `MoEDecoder.bias_parameters`; sinks are among them."""
        attention = (self.n_heads + 2 * self.n_kv_heads) * self.head_width + self.dim + self.n_heads
        mixture = experts * (2 * self.expert_dim + self.dim)
        routers = super(GptOss, self).bias_parameters(experts)
        return self.n_layers * attention + self.n_expert_layers * mixture + routers

    def score_flops(self, seq_len: int, *, causal: bool) -> float:
        """See `DenseDecoder.score_flops`: a window's scores are those that it lets through.

        Causal, a token sees min(i, w) of S keys, i from 0 to S: w - w²/(2 S) on average.
        """
        keys = 0.0
        for index in range(self.n_layers):
            seen = min(self.layer_window(index) or seq_len, seq_len)
            keys += seen - seen**2 / (2 * seq_len) if causal else seen
        return 12.0 * self.n_heads * self.head_width * keys

    def device_problems(self, device_type: str, compute_dtype: str = "bfloat16") -> list[Problem]:
        """See `ModelConfig.device_problems`."""
        if self.attention == "varlen":
            message = "model.attention = varlen has neither sinks nor this model's windows"
            return [Problem(message, "auto, blocked, sdpa, flex", "--model.attention auto")]
        return super(GptOss, self).device_problems(device_type, compute_dtype)

    def problems(self, seq_len: int) -> list[Problem]:
        """See `ModelConfig.problems`."""
        found = super(GptOss, self).problems(seq_len)
        for name in ("window", "gate_limit"):
            if getattr(self, name) <= 0:
                message = f"model.{name} = {getattr(self, name)} is not positive"
                found.append(Problem(message, "numbers above 0"))
        return found


class GptOssSize(NamedTuple):
    """What differs between the sizes."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_experts: int
    n_active: int
    expert_dim: int
    window: int

    def fields(self) -> dict[str, Any]:
        """The size as fields of a `GptOss`."""
        return self._asdict()


GPT_OSS_SIZES = {
    #                     D     L   H   K  P   E    k  F     window
    "debug": GptOssSize(128, 4, 8, 4, 16, 8, 2, 64, 32),
    "20B": GptOssSize(2880, 24, 64, 8, 64, 32, 4, 2880, 128),
    "120B": GptOssSize(2880, 36, 64, 8, 64, 128, 4, 2880, 128),
}
"""Sizes as published (arXiv 2508.10925, table 1, and the model cards' config.json); and ours."""

_VOCAB_SIZE = 201_088
_DEBUG_VOCAB_SIZE = 2048


def gpt_oss(size: str) -> GptOss:
    """A published size: "20B", "120B", or "debug".

    Raises:
        UserError: no such size.
    """
    row = named("gpt_oss", size, GPT_OSS_SIZES)
    vocabulary = _DEBUG_VOCAB_SIZE if size == "debug" else _VOCAB_SIZE
    return GptOss(**row.fields(), vocab_size=vocabulary)
