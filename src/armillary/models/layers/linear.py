"""The matrix multiplication all blocks are made of."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armillary.kernels import swiglu, swiglu_linear
from armillary.models.layers.initializer import ZEROS, Initializer, truncated_normal

Product = Callable[[Tensor, Tensor], Tensor]
"""x `[..., inputs]` and weight `[outputs, inputs]` of one dtype -> x weightᵀ `[..., outputs]`."""


class Linear(nn.Module):
    """y = x Wᵀ + b, computed in the dtype of x whatever dtype the weight is kept in."""

    def __init__(self, inputs: int, outputs: int, *, std: float, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.std = std
        self.product: Product = F.linear
        """How x and the weight are multiplied; low precision puts its own in the place."""

    def initializers(self) -> dict[str, Initializer]:
        """Initialisation of weight and bias."""
        return {"weight": truncated_normal(self.std), "bias": ZEROS}

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., inputs]` -> `[..., outputs]`."""
        y = self.product(x, self.weight.to(x.dtype))
        return y if self.bias is None else y + self.bias.to(y.dtype)


class GatedLinear(Linear):
    """y = (silu(gate) * up) Wᵀ; the product inside is not kept for the backward pass."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:  # type: ignore[override]
        """gate and up `[..., inputs]` -> `[..., outputs]`."""
        if self.product is F.linear and self.bias is None:
            return swiglu_linear(gate, up, self.weight.to(gate.dtype))
        return super().forward(swiglu(gate, up))
