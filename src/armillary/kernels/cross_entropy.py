"""The output projection and the cross-entropy as one function that never holds all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk_tokens: int = 1024,
    ignore_index: int = -100,
) -> Tensor:
    """The sum over valid labels of -log softmax(hidden weightᵀ)[label], an fp32 scalar.

    Args:
        hidden: `[T, D]`, in the dtype of the computation.
        weight: `[V, D]`, cast once to the dtype of `hidden`.
        labels: `[T]` int64; tokens with `ignore_index` count for nothing.
        chunk_tokens: tokens whose logits exist at one time.
    """
    wanted = torch.is_grad_enabled()  # always off inside an autograd function
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, chunk_tokens, ignore_index, wanted
    )
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients beside the loss, while a chunk's logits exist.

    The alternative, to compute the logits again in the backward pass, saves the `[V, D]` fp32
    gradient between the passes and costs a third more multiplications in the head.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk: int,
        ignore_index: int,
        wanted: bool,
    ) -> Tensor:
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        low_weight = weight.to(hidden.dtype)
        want_hidden, want_weight = (wanted and needed for needed in ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if want_weight else None
        loss = torch.zeros((), dtype=exact, device=hidden.device)
        for begin in range(0, hidden.shape[0], chunk):
            tokens = slice(begin, begin + chunk)
            logits = hidden[tokens] @ low_weight.mT  # [C, V]
            part, grad_logits = _chunk_loss(logits.to(exact), labels[tokens], ignore_index)
            loss += part
            if not (want_hidden or want_weight):
                continue
            grad_low = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[tokens] = grad_low @ low_weight
            if grad_weight is not None:
                grad_weight += grad_low.mT @ hidden[tokens]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        factor = grad[None]  # with a dim, so that a bf16 gradient is scaled in fp32
        if grad_hidden is not None:
            grad_hidden = (grad_hidden * factor).to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * factor).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _chunk_loss(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Summed loss of logits `[C, V]` and its gradient, softmax - onehot, 0 for ignored labels."""
    ignored = labels == ignore_index
    target = labels.masked_fill(ignored, 0)[:, None]
    softmax = logits.softmax(dim=-1)  # one fused pass, several times faster than logsumexp and exp
    # log Σ exp(x) = max x - log max softmax(x), and max softmax(x) >= 1 / V
    log_sum = logits.amax(dim=-1, keepdim=True) - softmax.amax(dim=-1, keepdim=True).log_()
    loss = (log_sum - logits.gather(1, target)).squeeze(1).masked_fill_(ignored, 0.0).sum()
    grad = softmax.scatter_add_(1, target, torch.full_like(log_sum, -1.0))
    return loss, grad.masked_fill_(ignored[:, None], 0.0)
