"""Even loads without an auxiliary loss: biases that move once a step, and what loads look like."""

from __future__ import annotations

import torch
from torch import Tensor

STATISTICS = ("expert_load_max_over_mean", "expert_idle_share", "expert_bias_mean_absolute")
"""Names of `statistics`."""


def statistics(counts: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
    """What a layer's loads look like: scalars, by the names in `STATISTICS`.

    The ratio of the busiest expert's load to the mean, the share of experts without a token, and
    with a selection bias the mean of its absolute values.

    Args:
        counts: `[E]` int64, slots of each expert in the whole step, on all ranks.
        bias: `[E]` fp32, if there is one.
    """
    load, idle, biased = STATISTICS
    found = {load: _max_over_mean(counts), idle: (counts == 0).float().mean()}
    return found if bias is None else found | {biased: bias.abs().mean()}


@torch.no_grad()
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
