"""Root-mean-square normalisation, fp32 inside, that keeps its input and one number per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dim, in the dtype of x.

    (Zhang and Sennrich 2019, arXiv 1910.07467, eq. 4)

    Args:
        x: `[..., D]`.
        weight: `[D]`, of any float dtype.
        eps: added to the mean square.
    """
    out: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


class _RMSNorm(torch.autograd.Function):
    """With n = x r, r = 1 / rms(x) and g = dy w: dx = r (g - n mean(g n)), dw = Σ dy n."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        exact = torch.float64 if x.dtype == torch.float64 else torch.float32
        wide = x.to(exact)
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, weight, inverse)
        out: Tensor = (wide * inverse).mul_(weight).to(x.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        width = x.shape[-1]
        gain = weight.to(inverse.dtype)
        normed = (x.to(inverse.dtype) * inverse).view(-1, width)
        wide = grad.to(inverse.dtype).reshape(-1, width)
        product = wide * normed
        grad_weight = product.sum(dim=0).to(weight.dtype)
        mean = (product @ gain).div_(width)[:, None]
        grad_x = (wide * gain).addcmul_(normed, mean, value=-1).view(x.shape).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight, None
