"""Optimizers: one or more torch optimizers that act as one, with one learning-rate factor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from armillary.optim.skipping import can_skip, step_unless


class Optimizers:
    """The optimizers of a model. Every parameter belongs to exactly one of them.

    Args:
        optimizers: torch optimizers over disjoint parameters.
        rate: peak learning rate to report, the same on ranks that hold different parameters; None:
            that of the first group.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], *, rate: float | None = None
    ) -> None:
        self.optimizers = list(optimizers)
        self._base_rates = [
            [float(group["lr"]) for group in optimizer.param_groups]
            for optimizer in self.optimizers
        ]
        self._rate, self._factor = self._base_rates[0][0] if rate is None else rate, 1.0

    @property
    def can_skip(self) -> bool:
        """Whether `step` may be given `skipped`."""
        return all(can_skip(optimizer) for optimizer in self.optimizers)

    def step(self, skipped: Tensor | None = None) -> None:
        """Updates every parameter that has a gradient.

        Args:
            skipped: [] bool on the parameters' device: true there leaves parameters and state, the
                counts of steps among it, as they are, whatever the gradients. The host does not
                ask. None: false.
        """
        for optimizer in self.optimizers:
            if skipped is None:
                optimizer.step()
            else:
                step_unless(skipped, optimizer)

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def set_factor(self, factor: float) -> None:
        """Sets every group's learning rate to its own base rate times `factor`."""
        self._factor = factor
        for optimizer, rates in zip(self.optimizers, self._base_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor

    @property
    def learning_rate(self) -> float:
        """The current rate: for Muon, that of the matrices."""
        return self._rate * self._factor
