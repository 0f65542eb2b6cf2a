"""The matrix multiplication all blocks are made of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armillary.kernels import swiglu_linear
from armillary.models.layers.initializer import Initializer, truncated_normal


class Linear(nn.Module):
    """y = x Wᵀ, computed in the dtype of x whatever dtype the weight is kept in."""

    def __init__(self, inputs: int, outputs: int, *, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.std = std

    def initializers(self) -> dict[str, Initializer]:
        """Initialisation of the weight."""
        return {"weight": truncated_normal(self.std)}

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., inputs]` -> `[..., outputs]`."""
        return F.linear(x, self.weight.to(x.dtype))


class GatedLinear(Linear):
    """y = (silu(gate) * up) Wᵀ; the product inside is not kept for the backward pass."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:  # type: ignore[override]
        """gate and up `[..., inputs]` -> `[..., outputs]`."""
        return swiglu_linear(gate, up, self.weight.to(gate.dtype))
