"""Losses beside the main one, which enter the backward pass where they arise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def with_loss(x: Tensor, loss: Tensor) -> Tensor:
    """x itself, in a graph whose backward pass adds the gradient of `loss` with factor 1.

    The trainer differentiates a raw sum over tokens and divides once by their number at the end,
    so a loss that is a sum over tokens too can enter anywhere: its gradient is the same however
    tokens are spread over microbatches and ranks.
    """
    out: Tensor = _WithLoss.apply(x, loss)  # type: ignore[no-untyped-call]
    return out


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.new_ones(())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, ctx.like
