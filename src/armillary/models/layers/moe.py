"""A feed-forward made of experts, of which each token uses a few."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from armillary.models.layers.balance import STATISTICS, move_bias, statistics
from armillary.models.layers.dispatch import Routing, dispatch_locally
from armillary.models.layers.experts import Experts
from armillary.models.layers.mlp import SwiGLU
from armillary.models.layers.recompute import recomputing
from armillary.models.layers.router import Router

__all__ = ["Dispatch", "MoE", "Routing"]

Dispatch = Callable[[Tensor, Routing, Experts], Tensor]
"""(x `[T, D]`, routing, experts) -> `[T, D]`, the weighted sum of each token's experts."""


class MoE(nn.Module):
    """Router, experts and, in some families, an expert that every token uses.

    Expert parallelism replaces `dispatch` and `sequence_sum` on the instance; nothing else here
    depends on where experts are.
    """

    statistics = STATISTICS

    def __init__(self, *, router: Router, experts: Experts, shared: SwiGLU | None = None) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared
        self.dispatch: Dispatch = dispatch_locally
        self.sequence_sum: Callable[[Tensor], Tensor] | None = None
        """Sums a tensor over the ranks that hold other tokens of the same rows; None: none do."""
        self._load: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x `[B, S, D]` -> `[B, S, D]`."""
        routing = self.router(x, self.sequence_sum)
        if self.training and torch.is_grad_enabled() and not recomputing():
            counts = routing.counts
            self._load = counts if self._load is None else self._load + counts
        y = self.dispatch(x.flatten(0, 1), routing, self.experts).view_as(x)
        return y if self.shared is None else y + self.shared(x)

    def take_counts(self) -> Tensor:
        """Slots of each expert, `[E]` int64, since this was last asked; starts again from 0."""
        load, self._load = self._load, None
        if load is None:
            router = self.router
            load = torch.zeros(router.n_experts, dtype=torch.int64, device=router.weight.device)
        return load

    def end_step(self, counts: Tensor) -> dict[str, Tensor]:
        """Moves the selection bias by the loads of the step that is over, and reports the loads."""
        bias = self.router.expert_bias
        if bias is not None:
            move_bias(bias, counts, self.router.config.balance_rate)
        return statistics(counts, bias)
