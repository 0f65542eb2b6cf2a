"""The feed-forward half of a block."""

from __future__ import annotations

from torch import Tensor, nn

from armillary.models.layers.linear import GatedLinear, Linear


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)). (Shazeer 2020, arXiv 2002.05202, eq. 6)"""

    def __init__(self, dim: int, hidden: int, *, std: float, output_std: float) -> None:
        super().__init__()
        self.gate = Linear(dim, hidden, std=std)
        self.up = Linear(dim, hidden, std=std)
        self.down = GatedLinear(hidden, dim, std=output_std)

    def forward(self, x: Tensor) -> Tensor:
        """x `[B, S, D]` -> `[B, S, D]`, `[B, S, F]` wide inside."""
        out: Tensor = self.down(self.gate(x), self.up(x))
        return out
