"""Which experts read a token, and how much each of them counts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armillary.models.layers.auxiliary import with_loss
from armillary.models.layers.dispatch import Routing, exact
from armillary.models.layers.initializer import ZEROS, Initializer, truncated_normal
from armillary.models.routing import RouterConfig

_TINY = 1e-20
"""Keeps the sum of the chosen scores from being 0; changes no sum above 1e-12 in fp32."""


class Router(nn.Module):
    """Token-choice top-k: every token takes the k experts that score highest with it.

    Scores are computed in fp32. Where scores are equal, the expert of the lower index is taken, on
    every device. With a `balance_rate`, each expert has a bias that is added to its score when
    experts are chosen and nowhere else (Wang et al. 2024, arXiv 2408.15664; DeepSeek-V3, arXiv
    2412.19437, eq. 16): it moves load and has no gradient.
    """

    expert_bias: Tensor | None
    """`[E]` fp32, for choosing only; moved once a step, saved with the weights."""

    def __init__(
        self, dim: int, *, n_experts: int, n_active: int, std: float, config: RouterConfig
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_experts, dim))
        self.bias = nn.Parameter(torch.empty(n_experts)) if config.bias else None
        balanced = config.balance_rate > 0
        bias = torch.zeros(n_experts, dtype=torch.float32) if balanced else None
        self.register_buffer("expert_bias", bias)
        self.n_experts, self.n_active, self.std, self.config = n_experts, n_active, std, config

    def initializers(self) -> dict[str, Initializer]:
        """Initialisation of weight and biases."""
        return {"weight": truncated_normal(self.std), "bias": ZEROS, "expert_bias": ZEROS}

    def forward(self, x: Tensor, sequence_sum: Callable[[Tensor], Tensor] | None = None) -> Routing:
        """Hidden x `[B, S, D]` -> the routing of T = B S tokens.

        Args:
            x: what experts will read.
            sequence_sum: sums a tensor over the ranks that hold other tokens of the same rows.
        """
        logits = self._logits(x)  # [B, S, E]
        softmax = self.config.score == "softmax"
        scores = logits.softmax(dim=-1) if softmax else logits.sigmoid()
        expert = self.choose(scores.detach())  # [B, S, k]
        weight = scores.gather(-1, expert)
        if self.config.normalize:
            weight = weight / (weight.sum(dim=-1, keepdim=True) + _TINY)
        if self.config.scale != 1.0:
            weight = weight * self.config.scale
        by_row = counts_of(expert.flatten(1), self.n_experts)  # [B, E]
        if self.training and torch.is_grad_enabled():
            weight = self._with_losses(weight, logits, scores, by_row, sequence_sum)
        return Routing(expert.flatten(0, 1), weight.flatten(0, 1), by_row.sum(dim=0))

    def _logits(self, x: Tensor) -> Tensor:
        # The weight is rounded as that of every layer is, the product is not.
        wide = exact(x.dtype)
        weight = self.weight.to(x.dtype).to(wide)
        bias = None if self.bias is None else self.bias.to(x.dtype).to(wide)
        return F.linear(x.to(wide), weight, bias)

    def choose(self, scores: Tensor) -> Tensor:
        """Scores `[..., E]` -> experts `[..., k]`, the best first.

        (DeepSeek-V3, arXiv 2412.19437, eq. 12-16 and section 2.1.2: only the groups with the
        highest sum of their two best affinities are eligible.)
        """
        if self.expert_bias is not None:
            scores = scores + self.expert_bias.to(scores.dtype)
        config = self.config
        if config.n_top_groups < config.n_groups:
            grouped = scores.view(*scores.shape[:-1], config.n_groups, -1)  # [..., G, E / G]
            best = grouped.topk(2 if config.group_score == "top-2" else 1, dim=-1).values
            allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool)
            allowed.scatter_(-1, largest(best.sum(dim=-1), config.n_top_groups), True)
            scores = grouped.masked_fill(~allowed[..., None], -torch.inf).flatten(-2)
        return largest(scores, self.n_active)

    def _with_losses(
        self,
        weight: Tensor,
        logits: Tensor,
        scores: Tensor,
        by_row: Tensor,
        sequence_sum: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        if self.config.sequence_loss > 0:
            if sequence_sum is not None:
                by_row = sequence_sum(by_row)
            loss = sequence_balance_loss(scores, by_row)
            weight = with_loss(weight, loss * self.config.sequence_loss)
        if self.config.z_loss > 0:
            weight = with_loss(weight, router_z_loss(logits) * self.config.z_loss)
        return weight


def largest(scores: Tensor, k: int) -> Tensor:
    """Indices `[..., k]` of the k largest of scores `[..., E]`, equal ones by index.

    (torch.topk promises no order among equals; argmax promises the first.)
    """
    left, found = scores.clone(), []
    for _ in range(k):
        index = left.argmax(dim=-1, keepdim=True)
        left.scatter_(-1, index, -torch.inf)
        found.append(index)
    return torch.cat(found, dim=-1)


def counts_of(expert: Tensor, n_experts: int) -> Tensor:
    """How often each expert occurs in the last dim of expert `[..., N]` -> `[..., E]` int64."""
    counts = expert.new_zeros(*expert.shape[:-1], n_experts)
    return counts.scatter_add_(-1, expert, torch.ones_like(expert))


def sequence_balance_loss(scores: Tensor, by_row: Tensor) -> Tensor:
    """Sum over rows of S sum_i f_i P_i: the sequence-wise balance loss, weighted per token.

    f_i is E / (k S) times the slots of expert i in the whole row, P_i the mean of the scores,
    normalised over experts (DeepSeek-V3, arXiv 2412.19437, eq. 17-20; f counts the experts that
    were chosen, after any selection bias). f is constant, so that the loss is a sum over tokens:
    tokens of a row may lie on several ranks, if `by_row` is of all of them.

    Args:
        scores: `[B, S, E]`, of the tokens here.
        by_row: `[B, E]`, slots of each expert in the whole row.
    """
    counts = by_row.to(scores.dtype)
    load = counts * (counts.shape[1] / counts.sum(dim=1, keepdim=True))  # f, [B, E]
    share = scores / (scores.sum(dim=-1, keepdim=True) + _TINY)
    return (share.sum(dim=1) * load).sum()


def router_z_loss(logits: Tensor) -> Tensor:
    """Sum over tokens of logsumexp(logits)². (Zoph et al. 2022, arXiv 2202.08906, eq. 5)"""
    return logits.logsumexp(dim=-1).square().sum()
