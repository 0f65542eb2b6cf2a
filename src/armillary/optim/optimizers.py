"""Optimizers: one or more torch optimizers that act as one, with one learning-rate factor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Optimizers:
    """The optimizers of a model. Every parameter belongs to exactly one of them.

    Args:
        optimizers: torch optimizers over disjoint parameters.
        names: the name of each parameter; decides the keys of `state`.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], names: Mapping[Tensor, str]
    ) -> None:
        self.optimizers = list(optimizers)
        self._names = dict(names)
        self._base_rates = [
            [float(group["lr"]) for group in optimizer.param_groups]
            for optimizer in self.optimizers
        ]

    def step(self) -> None:
        """Updates every parameter that has a gradient."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def set_factor(self, factor: float) -> None:
        """Sets every group's learning rate to its own base rate times `factor`."""
        for optimizer, rates in zip(self.optimizers, self._base_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor

    @property
    def learning_rate(self) -> float:
        """The current rate of the first group: for Muon, that of the matrices."""
        return float(self.optimizers[0].param_groups[0]["lr"])

    @torch.no_grad()
    def state(self) -> dict[str, Tensor]:
        """The live state tensors by `<parameter name>.<quantity>`, e.g. `norm.weight.exp_avg`.

        Tensors have the placements of their parameters, so a checkpoint of them fits any mesh.
        State that does not exist yet is made, as it is before the first step. To load is to write
        into these tensors.
        """
        for optimizer in self.optimizers:
            self._materialise(optimizer)
        return {
            f"{self._names[parameter]}.{quantity}": value
            for optimizer in self.optimizers
            for parameter, values in optimizer.state.items()
            for quantity, value in values.items()
            if isinstance(value, Tensor)
        }

    def _materialise(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes missing state by an update with rate 0 and gradient 0, then zeroes it."""
        missing = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if not optimizer.state.get(parameter)
        ]
        if not missing:
            return
        kept: dict[Tensor, Tensor | None] = {}
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
            for parameter in group["params"]:
                kept[parameter] = parameter.grad
        for parameter in kept:
            parameter.grad = None
        for parameter in missing:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for parameter, gradient in kept.items():
            parameter.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for parameter in missing:
            for value in optimizer.state[parameter].values():
                if isinstance(value, Tensor):
                    value.zero_()
