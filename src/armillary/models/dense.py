"""What dense decoder families share: their fields, counts, FLOPs and consistency. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from armillary.foundation.divisors import divisors, listed
from armillary.foundation.errors import Problem
from armillary.models.config import ModelConfig
from armillary.models.rope_scaling import Llama31RopeScaling

if TYPE_CHECKING:
    from torch import nn

    from armillary.models.decoder import Decoder

AttentionName = Literal["auto", "blocked", "sdpa", "flex", "varlen"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseDecoder(ModelConfig):
    """Blocks of grouped-query attention and SwiGLU between an embedding and a head."""

    vocab_size: int = 4096
    """Rows of the embedding, V; at least the tokenizer's."""
    dim: int = 256
    """Width of the residual stream, D."""
    n_layers: int = 8
    """Blocks, L."""
    n_heads: int = 8
    """Query heads, H."""
    n_kv_heads: int = 4
    """Key and value heads, K; divides n_heads."""
    head_dim: int | None = None
    """Width of a head, P; none: dim / n_heads."""
    ffn_dim: int = 768
    """Hidden width of the feed-forward, F."""
    norm_eps: float = 1e-5
    """Added to the mean square in norms."""
    rope_theta: float = 500_000.0
    """Base of the rotary wavelengths."""
    rope_scaling: Llama31RopeScaling | None = None
    """Stretching of rotary positions to a longer context; none: off."""
    tied_embeddings: bool = False
    """Whether the head uses the embedding's weight."""
    max_seq_len: int = 8192
    """Longest row the model is meant for, in tokens."""
    attention: AttentionName = "auto"
    """Attention backend; auto: the fastest exact one on the device."""
    init_std: float = 0.02
    """Standard deviation of the initial matrices and of the embedding, before the cut at 3 std."""
    init_depth: Literal["model", "layer"] = "model"
    """Output projections shrink by 1 / sqrt(2 L) (model) or 1 / sqrt(2 (index + 1)) (layer)."""

    @property
    def head_width(self) -> int:
        """P, whether given or derived."""
        return self.dim // self.n_heads if self.head_dim is None else self.head_dim

    @property
    def rotated_width(self) -> int:
        """How much of a head's width is rotated: all of it."""
        return self.head_width

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head."""
        return False

    def build(self) -> Decoder:
        """See `ModelConfig.build`."""
        from armillary.models.decoder import Decoder

        return Decoder(**self.build_parts())

    def build_parts(self) -> dict[str, Any]:
        """What a `Decoder` is made of, by the names of its arguments."""
        from armillary.models.layers.embedding import Embedding, Head
        from armillary.models.layers.norm import RMSNorm
        from armillary.models.layers.rope import Rope

        rope = Rope(head_dim=self.rotated_width, theta=self.rope_theta, scaling=self.rope_scaling)
        return {
            "embedding": Embedding(self.vocab_size, self.dim, std=self.init_std),
            "layers": [self.build_block(index) for index in range(self.n_layers)],
            "norm": RMSNorm(self.dim, eps=self.norm_eps),
            "head": Head(self.dim, self.vocab_size, std=self.dim**-0.5),
            "rope": rope,
            "head_width": self.head_width,
            "max_seq_len": self.max_seq_len,
            "tied_embeddings": self.tied_embeddings,
            "attention": self.attention,
        }

    def build_block(self, index: int) -> nn.Module:
        """Block `index`, from 0; a family that differs in its blocks overrides this."""
        from armillary.models.layers.block import Block
        from armillary.models.layers.norm import RMSNorm

        return Block(
            attention_norm=RMSNorm(self.dim, eps=self.norm_eps),
            attention=self.build_attention(index),
            feed_forward_norm=RMSNorm(self.dim, eps=self.norm_eps),
            feed_forward=self.build_feed_forward(index),
        )

    def build_attention(self, index: int) -> nn.Module:
        """Attention of block `index`."""
        from armillary.models.layers.attention import Attention

        return Attention(
            self.dim,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_width,
            std=self.init_std,
            output_std=self.output_std(index),
            head_norm_eps=self.norm_eps if self.qk_norm else None,
            backend=self.attention,
        )

    def build_feed_forward(self, index: int) -> nn.Module:
        """Feed-forward of block `index`."""
        from armillary.models.layers.mlp import SwiGLU

        output_std = self.output_std(index)
        return SwiGLU(self.dim, self.ffn_dim, std=self.init_std, output_std=output_std)

    def output_std(self, index: int) -> float:
        """Initial std of the projections of block `index` that write to the residual stream."""
        depth = self.n_layers if self.init_depth == "model" else index + 1
        return self.init_std / math.sqrt(2 * depth)

    def attention_parameters(self) -> int:
        """Weights of one block's attention that multiply activations."""
        return 2 * self.dim * (self.n_heads + self.n_kv_heads) * self.head_width

    def matmul_parameters(self) -> dict[str, int]:
        """Weights that multiply activations, by layer kind; the embedding lookup is none."""
        return {
            "attention.projections": self.n_layers * self.attention_parameters(),
            "feed_forward": self.n_layers * 3 * self.dim * self.ffn_dim,
            "head": self.vocab_size * self.dim,
        }

    def norm_parameters(self) -> int:
        """Gains of all norms."""
        per_block = 2 * self.dim + (2 * self.head_width if self.qk_norm else 0)
        return self.n_layers * per_block + self.dim

    def parameter_count(self) -> int:
        """See `ModelConfig.parameter_count`."""
        embedding = 0 if self.tied_embeddings else self.vocab_size * self.dim
        return embedding + sum(self.matmul_parameters().values()) + self.norm_parameters()

    def flops_breakdown(self, seq_len: int, *, causal: bool) -> dict[str, float]:
        """See `ModelConfig.flops_breakdown`; formula and conventions in docs/conventions.md."""
        flops = {kind: 6.0 * count for kind, count in self.matmul_parameters().items()}
        return flops | {"attention.scores": self.score_flops(seq_len, causal=causal)}

    def score_flops(self, seq_len: int, *, causal: bool) -> float:
        """Of all layers, for one token: queries with keys, and weights with values."""
        scores = 12.0 * self.n_layers * self.n_heads * self.head_width * seq_len
        return scores / 2 if causal else scores

    def problems(self, seq_len: int) -> list[Problem]:
        """See `ModelConfig.problems`."""
        return [*self._size_problems(), *self._head_problems(), *self._range_problems(seq_len)]

    def device_problems(self, device_type: str, compute_dtype: str = "bfloat16") -> list[Problem]:
        """See `ModelConfig.device_problems`."""
        from armillary.models.layers.backends import Conditions, attention_problems

        conditions = Conditions(
            device_type=device_type, compute_dtype=compute_dtype, head_width=self.head_width
        )
        return attention_problems(self.attention, conditions)

    def divisors(self) -> dict[str, dict[str, int]]:
        """See `ModelConfig.divisors`."""
        heads = {"model.n_heads": self.n_heads, "model.n_kv_heads": self.n_kv_heads}
        return {
            "tp": heads | {"model.ffn_dim": self.ffn_dim},
            "ulysses": {"model.n_heads": self.n_heads},
            "pp": {"model.n_layers": self.n_layers},
        }

    def _size_problems(self) -> list[Problem]:
        names = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim")
        positive = (*names, "max_seq_len", "norm_eps", "rope_theta", "init_std")
        return [
            Problem(f"model.{name} = {getattr(self, name)} is not positive", "numbers above 0")
            for name in positive
            if getattr(self, name) <= 0
        ]

    def _head_problems(self) -> list[Problem]:
        found: list[Problem] = []
        heads, kv_heads = self.n_heads, self.n_kv_heads
        if min(self.dim, heads, kv_heads) < 1:
            return found  # reported as sizes
        if heads % kv_heads:
            message = f"model.n_kv_heads = {kv_heads} does not divide model.n_heads = {heads}"
            found.append(Problem(message, listed(divisors(heads)), f"--model.n-kv-heads {heads}"))
        if self.head_dim is None and self.dim % heads:
            message = f"model.n_heads = {heads} does not divide model.dim = {self.dim}"
            fix = f"--model.dim {(self.dim // heads + 1) * heads}, or set --model.head-dim"
            found.append(Problem(message, f"multiples of {heads}", fix))
        elif self.head_width < 2 or self.head_width % 2:
            message = f"model.head_dim = {self.head_width} cannot be rotated in pairs"
            found.append(Problem(message, "even numbers from 2", "--model.head-dim 64"))
        return found

    def _range_problems(self, seq_len: int) -> list[Problem]:
        found = []
        if seq_len > self.max_seq_len:
            message = f"budget.seq_len = {seq_len} is above model.max_seq_len = {self.max_seq_len}"
            fix = f"--model.max-seq-len {seq_len}"
            found.append(Problem(message, f"1 to {self.max_seq_len}", fix))
        if self.rope_scaling is not None and not self.rope_scaling.is_consistent():
            message = f"model.rope_scaling = {self.rope_scaling} is inconsistent"
            found.append(Problem(message, self.rope_scaling.consistent))
        return found
