"""Root-mean-square normalisation, fp32 inside, that keeps its input and one number per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from armillary.kernels.rows import pieces


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
        rows = x.reshape(-1, x.shape[-1])  # [T, D]
        gain = weight.to(exact)
        out = torch.empty_like(rows)
        inverse = rows.new_empty(rows.shape[0], 1, dtype=exact)
        for piece in pieces(rows):
            wide = rows[piece].to(exact)
            norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
            r = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            inverse[piece] = r
            out[piece] = (wide * r).mul_(gain)
        ctx.save_for_backward(rows, weight, inverse)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        exact, width = inverse.dtype, x.shape[-1]
        gain = weight.to(exact)
        grads = grad.reshape(-1, width)
        grad_x, grad_gain = torch.empty_like(x), torch.zeros_like(gain)
        for piece in pieces(x):
            r = inverse[piece]
            normed = x[piece].to(exact) * r
            g = grads[piece].to(exact)
            product = g * normed
            grad_gain += product.sum(dim=0)
            mean = (product @ gain).div_(width)[:, None]
            grad_x[piece] = (g * gain).addcmul_(normed, mean, value=-1).mul_(r)
        return grad_x.view(grad.shape), grad_gain.to(weight.dtype), None
