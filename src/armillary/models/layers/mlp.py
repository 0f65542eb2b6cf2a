"""The feed-forward half of a block."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from armillary.models.layers.linear import GatedLinear, Linear


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)). (Shazeer 2020, arXiv 2002.05202, eq. 6)"""

    tensor_region = True
    tensor_split: ClassVar[dict[str, str]] = {"gate": "outputs", "up": "outputs", "down": "inputs"}

    def __init__(self, dim: int, hidden: int, *, std: float, output_std: float) -> None:
        super().__init__()
        self.gate = Linear(dim, hidden, std=std)
        self.up = Linear(dim, hidden, std=std)
        self.down = GatedLinear(hidden, dim, std=output_std)

    def forward(self, x: Tensor) -> Tensor:
        """x `[B, S, D]` -> `[B, S, D]`, `[B, S, F]` wide inside."""
        out: Tensor = self.down(*self.project(x))
        return out

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Gate and up of x `[B, S, D]`, each `[B, S, F]`."""
        return self.gate(x), self.up(x)
