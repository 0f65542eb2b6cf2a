"""Rotary position embedding, keeping only its tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from armillary.kernels.rows import pieces


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x[i], x[i + P/2]) by the angles in the tables, in their precision.

    (Su et al. 2021, arXiv 2104.09864, eq. 34, with the halves paired.) The result is contiguous;
    the gradient lies in memory as `[B, S, H, P]`, as the projection before the rotation wants it.

    Args:
        x: `[B, H, S, P]`.
        cos: `[B, S, P/2]`, or `[S, P/2]` for all rows.
        sin: the same shape.
    """
    out: Tensor = _Rope.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    if cos.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]  # [B, 1, S, P/2]
    half = cos.shape[-1]
    both = torch.cat((cos, cos), dim=-1)
    dtype = torch.promote_types(x.dtype, cos.dtype)
    for piece in pieces(x):
        here = piece if cos.dim() == 4 else ...
        wide = x[piece].to(dtype, memory_format=torch.contiguous_format)
        rotated = wide * both[here]
        rotated[..., :half].addcmul_(wide[..., half:], sin[here], value=-1)
        rotated[..., half:].addcmul_(wide[..., :half], sin[here])
        out[piece] = rotated
    return out


class _Rope(torch.autograd.Function):
    """A rotation; its gradient is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, x.new_empty(x.shape))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        batch, heads, length, head_dim = grad.shape
        grad_x = grad.new_empty(batch, length, heads, head_dim).transpose(1, 2)
        return _rotate(grad, cos, -sin, grad_x), None, None
