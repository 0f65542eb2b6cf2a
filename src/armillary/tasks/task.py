"""The task slot: how a batch becomes a loss, and how much it weighs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from armillary.foundation.component import Component

if TYPE_CHECKING:
    from torch import Tensor, nn

    from armillary.data.batch import Batch


@dataclass(frozen=True, slots=True)
class Loss:
    """A sum over valid items and how many there are; never a mean.

    The gradient of a global step is that of (sum of all sums) / (sum of all weights), whatever the
    split into microbatches and ranks.
    """

    sum: Tensor
    """[] float32, differentiable."""
    weight: Tensor
    """[] int64, how many items were summed."""


class TaskConfig(Component, ABC):
    """How a batch becomes a loss."""

    __slots__ = ()

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """The forward pass and the loss of one microbatch."""

    @abstractmethod
    def weight(self, batch: Batch) -> int:
        """The weight that `loss` will have, known on the host before any forward pass.

        Call it before the batch moves to a device, or it waits for the device.
        """

    def weights(self, batch: Batch) -> tuple[int, ...]:
        """The weights of all terms of the loss, the main one first; of a batch on the host."""
        return (self.weight(batch),)

    def within(self, weights: tuple[int, ...]) -> TaskConfig:
        """The task within a step whose `weights`, summed over batches and ranks, are these.

        A term beside the main one is a mean over items of its own. Since all gradients are divided
        by the main weight in the end, it has to know both to be added as a sum.
        """
        return self
