"""The matrix multiplication all blocks are made of."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armillary.kernels import swiglu, swiglu_linear
from armillary.models.layers.initializer import ZEROS, Initializer, truncated_normal
from armillary.models.layers.low_rank import WithLowRank

Product = Callable[[Tensor, Tensor], Tensor]
"""x `[..., inputs]` and weight `[outputs, inputs]` of one dtype -> x weightᵀ `[..., outputs]`."""


class Linear(WithLowRank):
    """y = x Wᵀ + b, computed in the dtype of x whatever dtype the weight is kept in."""

    def __init__(self, inputs: int, outputs: int, *, std: float, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.std = std
        self.product: Product = F.linear
        """How x and the weight are multiplied; low precision puts its own in the place."""

    def initializers(self) -> dict[str, Initializer]:
        """Initialisation of weight, bias and low-rank factors."""
        own = {"weight": truncated_normal(self.std), "bias": ZEROS}
        return own | self.low_rank_initializers()

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., inputs]` -> `[..., outputs]`."""
        y = self.multiply(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def multiply(self, x: Tensor) -> Tensor:
        """x `[..., inputs]` by the weight and what stands beside it, without the bias."""
        y = self.product(x, self.weight.to(x.dtype))
        factors = self.low_rank("weight")
        return y if factors is None else y + factors.linear(x)

    @property
    def is_plain(self) -> bool:
        """Whether `multiply` is one product in full precision."""
        return self.product is F.linear and not self.low_rank_scales


class GatedLinear(Linear):
    """y = (silu(gate) * up) Wᵀ; the product inside is not kept for the backward pass."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:  # type: ignore[override]
        """gate and up `[..., inputs]` -> `[..., outputs]`."""
        if self.is_plain and self.bias is None:
            return swiglu_linear(gate, up, self.weight.to(gate.dtype))
        return super().forward(swiglu(gate, up))
