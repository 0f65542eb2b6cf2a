"""Even loads without an auxiliary loss: biases that move once a step, and what loads look like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from armillary.models.layers.moe import MoE

Total = Callable[[Tensor], Tensor]
"""Sums a tensor over all ranks that saw other tokens."""


@torch.no_grad()
def end_step(layers: Sequence[MoE], total: Total) -> dict[str, float]:
    """Moves the selection biases by the loads of the step that is over, and reports the loads.

    One sum over ranks and one wait for the device serve all layers. Every rank calls it after
    every optimizer step, whether or not it saw tokens.

    Returns:
        Over all layers: `expert_load_max_over_mean`, the largest ratio of a layer's busiest expert
        to its mean; `expert_idle_share`, the largest share of experts without a token; and with
        selection biases `expert_bias_mean_absolute`, the largest mean of their absolute values.
    """
    if not layers:
        return {}
    loads = [layer.take_load() for layer in layers]
    counts = torch.split(total(torch.cat(loads)), [load.numel() for load in loads])
    for layer, count in zip(layers, counts, strict=True):
        rate, bias = layer.router.config.balance_rate, layer.router.expert_bias
        if bias is not None:
            move_bias(bias, count, rate)
    figures = {
        "expert_load_max_over_mean": [_max_over_mean(count) for count in counts],
        "expert_idle_share": [(count == 0).float().mean() for count in counts],
        "expert_bias_mean_absolute": [
            layer.router.expert_bias.abs().mean()
            for layer in layers
            if layer.router.expert_bias is not None
        ],
    }
    names = [name for name, values in figures.items() if values]
    largest = torch.stack([torch.stack(figures[name]).max() for name in names])
    return dict(zip(names, largest.tolist(), strict=True))


def move_bias(bias: Tensor, counts: Tensor, rate: float) -> None:
    """bias += rate * sign(mean - counts), then centred around 0. In place.

    (Wang et al. 2024, arXiv 2408.15664, algorithm 1. The mean is removed because only differences
    between biases choose; without it they would drift.)

    Args:
        bias: `[E]` fp32.
        counts: `[E]` int64, slots of each expert in the whole step, on all ranks.
        rate: u.
    """
    below = torch.sign(counts.sum() - counts.numel() * counts)  # of integers, so exact
    bias.add_(below.to(bias.dtype), alpha=rate)
    bias.sub_(bias.mean())


def _max_over_mean(counts: Tensor) -> Tensor:
    return counts.max().float() / counts.float().mean().clamp(min=1 / counts.numel())
