"""What decoder families with mixtures of experts share. No torch at import."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from armillary.foundation.errors import Problem
from armillary.models.dense import DenseDecoder
from armillary.models.rope_scaling import YarnRopeScaling
from armillary.models.routing import RouterConfig

if TYPE_CHECKING:
    from torch import nn

    from armillary.models.layers.experts import Experts


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEDecoder(DenseDecoder):
    """A decoder whose blocks, from some layer on, have experts in the place of the feed-forward."""

    rope_scaling: YarnRopeScaling | None = None  # type: ignore[assignment]  # another way to stretch
    """Stretching of rotary positions to a longer context; none: off."""
    n_experts: int = 8
    """Experts of a layer that are chosen from, E."""
    n_active: int = 2
    """Experts that a token is sent to, k."""
    expert_dim: int = 128
    """Hidden width of an expert, F."""
    n_shared_experts: int = 0
    """Experts that every token uses; they are one feed-forward of so many times expert_dim."""
    n_dense_layers: int = 0
    """First layers that have a feed-forward of width ffn_dim instead of experts."""
    router: RouterConfig = field(default_factory=RouterConfig)
    """How experts are chosen and kept evenly loaded."""

    @property
    def n_expert_layers(self) -> int:
        """Layers with experts."""
        return self.n_layers - self.n_dense_layers

    def build_feed_forward(self, index: int) -> nn.Module:
        """See `DenseDecoder.build_feed_forward`; experts, from some layer on."""
        from armillary.models.layers.mlp import SwiGLU
        from armillary.models.layers.moe import MoE
        from armillary.models.layers.router import Router

        if index < self.n_dense_layers:
            return super(MoEDecoder, self).build_feed_forward(index)
        std, output_std = self.init_std, self.output_std(index)
        router = Router(
            self.dim,
            n_experts=self.n_experts,
            n_active=self.n_active,
            std=std,
            config=self.router,
        )
        shared = None
        if self.n_shared_experts:
            width = self.n_shared_experts * self.expert_dim
            shared = SwiGLU(self.dim, width, std=std, output_std=output_std)
        return MoE(router=router, experts=self.build_experts(index), shared=shared)

    def build_experts(self, index: int) -> Experts:
        """The experts of block `index`."""
        from armillary.models.layers.experts import Experts

        return Experts(
            self.dim,
            self.expert_dim,
            n_experts=self.n_experts,
            std=self.init_std,
            output_std=self.output_std(index),
        )

    def matmul_parameters(self) -> dict[str, int]:
        """See `DenseDecoder.matmul_parameters`; all experts count."""
        return self._matmul_parameters(self.n_experts)

    def active_matmul_parameters(self) -> dict[str, int]:
        """The same, of what one token meets."""
        return self._matmul_parameters(self.n_active)

    def _matmul_parameters(self, experts: int) -> dict[str, int]:
        mixed, expert = self.n_expert_layers, 3 * self.dim * self.expert_dim
        counts = {
            "attention.projections": self.n_layers * self.attention_parameters(),
            "feed_forward": self.n_dense_layers * 3 * self.dim * self.ffn_dim,
            "router": mixed * self.n_experts * self.dim,
            "experts": mixed * experts * expert,
            "shared_experts": mixed * self.n_shared_experts * expert,
            "head": self.vocab_size * self.dim,
        }
        return {kind: count for kind, count in counts.items() if count}

    def bias_parameters(self, experts: int) -> int:
        """Biases and other parameters that are added, with so many experts a layer."""
        return self.n_expert_layers * self.n_experts if self.router.bias else 0

    def parameter_count(self) -> int:
        """See `ModelConfig.parameter_count`; selection biases are no parameters."""
        return self._count(self.n_experts)

    def active_parameter_count(self) -> int:
        """Parameters that one token meets: without the experts it is not sent to, and without the
        embedding, of which it reads a row."""
        return self._count(self.n_active) - self.vocab_size * self.dim * (not self.tied_embeddings)

    def _count(self, experts: int) -> int:
        embedding = 0 if self.tied_embeddings else self.vocab_size * self.dim
        matmul = sum(self._matmul_parameters(experts).values())
        return embedding + matmul + self.norm_parameters() + self.bias_parameters(experts)

    def flops_breakdown(self, seq_len: int, *, causal: bool) -> dict[str, float]:
        """See `ModelConfig.flops_breakdown`: of the experts that a token is sent to."""
        flops = {kind: 6.0 * count for kind, count in self.active_matmul_parameters().items()}
        return flops | {"attention.scores": self.score_flops(seq_len, causal=causal)}

    def divisors(self) -> dict[str, dict[str, int]]:
        """See `ModelConfig.divisors`."""
        heads = {"model.n_heads": self.n_heads, "model.n_kv_heads": self.n_kv_heads}
        widths = {}
        if self.n_dense_layers:
            widths["model.ffn_dim"] = self.ffn_dim
        if self.n_shared_experts:
            shared = self.n_shared_experts * self.expert_dim
            widths["model.n_shared_experts * model.expert_dim"] = shared
        return {
            "tp": heads | widths,
            "ulysses": {"model.n_heads": self.n_heads},
            "ep": {"model.n_experts": self.n_experts},
            "expert_tp": {"model.expert_dim": self.expert_dim},
            "pp": {"model.n_layers": self.n_layers},
        }

    def problems(self, seq_len: int) -> list[Problem]:
        """See `ModelConfig.problems`."""
        return [*super(MoEDecoder, self).problems(seq_len), *self._expert_problems()]

    def _expert_problems(self) -> list[Problem]:
        found = [
            Problem(f"model.{name} = {getattr(self, name)} is out of range", f"numbers from {low}")
            for name, low in (
                ("n_experts", 1), ("n_active", 1), ("expert_dim", 1), ("n_shared_experts", 0),
                ("n_dense_layers", 0),
            )
            if getattr(self, name) < low
        ]  # fmt: skip
        if self.n_active > self.n_experts >= 1:
            message = f"model.n_active = {self.n_active} is above model.n_experts"
            found.append(Problem(f"{message} = {self.n_experts}", f"1 to {self.n_experts}"))
        if self.n_dense_layers >= self.n_layers > 0:
            message = f"model.n_dense_layers = {self.n_dense_layers} leaves no layer for experts"
            found.append(Problem(message, f"0 to {self.n_layers - 1}"))
        return [*found, *self.router.problems(self.n_experts, self.n_active)]
