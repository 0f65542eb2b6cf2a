"""The gated activation of Llama's feed-forward, alone and with the projection after it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.rows import pieces


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, keeping the two inputs. (Shazeer 2020, arXiv 2002.05202, eq. 6)"""
    out: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """(silu(gate) * up) weightᵀ, keeping the three inputs and not the product.

    The backward pass needs silu(gate) in any case, so the product costs one multiplication more
    there, and a third of the feed-forward's activations need not be kept.

    Args:
        gate: `[..., F]`.
        up: `[..., F]`.
        weight: `[D, F]`, of the same dtype.
    """
    out: Tensor = _SwiGLULinear.apply(gate, up, weight)  # type: ignore[no-untyped-call]
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _product(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        for piece in pieces(gate):
            g = grad[piece]
            torch.mul(F.silu(gate[piece]), g, out=grad_up[piece])
            _silu_backward(g * up[piece], gate[piece], out=grad_gate[piece])
        return grad_gate, grad_up


class _SwiGLULinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return F.linear(_product(gate, up), weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        gate, up, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])  # [T, D]
        gates, ups = gate.reshape(-1, gate.shape[-1]), up.reshape(-1, up.shape[-1])  # [T, F]
        grad_up = rows @ weight  # of the product at first, of `up` after the loop
        grad_gate = torch.empty_like(gates)
        product = torch.empty_like(ups) if ctx.needs_input_grad[2] else None
        for piece in pieces(gates):
            activated = F.silu(gates[piece])
            if product is not None:
                torch.mul(activated, ups[piece], out=product[piece])
            grad_activated = grad_up[piece] * ups[piece]
            _silu_backward(grad_activated, gates[piece], out=grad_gate[piece])
            grad_up[piece] *= activated
        grad_weight = None if product is None else rows.mT @ product
        return grad_gate.view(gate.shape), grad_up.view(up.shape), grad_weight


def _product(gate: Tensor, up: Tensor) -> Tensor:
    out = gate.new_empty(gate.shape).view(-1, gate.shape[-1])  # [T, F]
    gates, ups = gate.reshape(out.shape), up.reshape(out.shape)
    for piece in pieces(out):
        torch.mul(F.silu(gates[piece]), ups[piece], out=out[piece])
    return out.view(gate.shape)


def _silu_backward(grad: Tensor, x: Tensor, *, out: Tensor) -> None:
    torch.ops.aten.silu_backward.grad_input(grad, x, grad_input=out)
