"""E feed-forward networks side by side, each with its own rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from armillary.kernels import swiglu
from armillary.kernels.grouped import grouped_bias, grouped_linear
from armillary.models.layers.initializer import ZEROS, Initializer, truncated_normal
from armillary.models.layers.low_rank import WithLowRank

GroupedProduct = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x `[N, I]`, weight `[E, O, I]`, ends `[E]`) -> `[N, O]`."""
Activation = Callable[[Tensor, Tensor], Tensor]
"""(gate `[N, F]`, up `[N, F]`) -> `[N, F]`."""


def clamped_swiglu(gate: Tensor, up: Tensor, *, limit: float = 7.0, alpha: float = 1.702) -> Tensor:
    """(up + 1) gate sigmoid(alpha gate), with gate at most `limit` and |up| at most `limit`.

    (GPT-OSS, arXiv 2508.10925, section 2.1: "an unconventional clamping and a residual
    connection"; the numbers are those of the released model.)
    """
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


class Experts(WithLowRank):
    """Each expert computes down(activation(gate(x), up(x))) of the rows that are routed to it.

    Weights are kept as fp32 masters and computed with in the dtype of x, as everywhere. An expert
    without rows gets a gradient of zeros.
    """

    expert_split: ClassVar[dict[str, int]] = {
        "gate": 1, "up": 1, "down": 2, "gate_bias": 1, "up_bias": 1,
        "gate_lora_b": 1, "up_lora_b": 1, "down_lora_a": 2,
    }  # fmt: skip
    """Dim along which F lies, by parameter: how the experts themselves can be cut, giving partial
    sums out. `down_bias` has none: each part adds its `output_bias_share` of it."""
    low_rank_targets: ClassVar[tuple[str, ...]] = ("gate", "up", "down")
    """Weights beside which low-rank factors can be put, a pair for each expert."""

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        n_experts: int,
        std: float,
        output_std: float,
        bias: bool = False,
        activation: Activation = swiglu,
    ) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(n_experts, hidden, dim))
        self.up = nn.Parameter(torch.empty(n_experts, hidden, dim))
        self.down = nn.Parameter(torch.empty(n_experts, dim, hidden))
        self.gate_bias = nn.Parameter(torch.empty(n_experts, hidden)) if bias else None
        self.up_bias = nn.Parameter(torch.empty(n_experts, hidden)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(n_experts, dim)) if bias else None
        self.std, self.output_std = std, output_std
        self.activation = activation
        self.product: GroupedProduct = grouped_linear
        """How rows and weights are multiplied; low precision puts its own in the place."""
        self.output_bias_share = 1.0
        """Part of `down_bias` that is added here; the parts of one expert add up to 1."""

    def initializers(self) -> dict[str, Initializer]:
        """Initialisation of weights, biases and low-rank factors."""
        inner, outer = truncated_normal(self.std), truncated_normal(self.output_std)
        weights = {"gate": inner, "up": inner, "down": outer}
        biases = dict.fromkeys(("gate_bias", "up_bias", "down_bias"), ZEROS)
        return weights | biases | self.low_rank_initializers()

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x `[N, D]` sorted by expert, counts `[E]` of rows of each, N in all -> `[N, D]`."""
        ends = counts.cumsum(0).to(torch.int32)
        gate = self._linear("gate", x, self.gate_bias, ends)  # [N, F]
        up = self._linear("up", x, self.up_bias, ends)
        hidden = self.activation(gate, up)
        y = self._multiply("down", hidden, ends)
        if self.down_bias is not None:
            bias = self.down_bias.to(y.dtype)
            y = grouped_bias(y, bias * self.output_bias_share, ends)
        return y

    def _linear(self, name: str, x: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
        y = self._multiply(name, x, ends)
        return y if bias is None else grouped_bias(y, bias.to(y.dtype), ends)

    def _multiply(self, name: str, x: Tensor, ends: Tensor) -> Tensor:
        """x `[N, I]` by the weight of this name and what stands beside it -> `[N, O]`."""
        y = self.product(x, getattr(self, name).to(x.dtype), ends)
        factors = self.low_rank(name)
        if factors is None:
            return y
        inner = grouped_linear(x, factors.a.to(x.dtype), ends) * factors.scale  # [N, r]
        return y + grouped_linear(inner, factors.b.to(x.dtype), ends)
