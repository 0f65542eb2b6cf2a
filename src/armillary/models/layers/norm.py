"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from armillary.kernels import rms_norm
from armillary.models.layers.initializer import ONES, Initializer


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight over the last dim: fp32 inside, the dtype of x outside.

    The gain is rounded to the dtype of x, like every weight of a block, wherever it is kept.
    (Zhang and Sennrich 2019, arXiv 1910.07467, eq. 4)
    """

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def initializers(self) -> dict[str, Initializer]:
        """Initialisation of the gain."""
        return {"weight": ONES}

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., width]` -> the same shape and dtype."""
        return rms_norm(x, self.weight.to(x.dtype), self.eps)
