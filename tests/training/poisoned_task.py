"""Next-token prediction that goes wrong at some samples: what a bad document does to a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from armillary.foundation.component import component
from armillary.tasks.next_token import NextToken
from armillary.tasks.task import Loss, TaskConfig

if TYPE_CHECKING:
    from torch import nn

    from armillary.data.batch import Batch


@component("poisoned")
@dataclass(frozen=True, kw_only=True, slots=True)
class Poisoned(NextToken):
    """Multiplies the loss of microbatches that hold one of the samples."""

    samples: tuple[int, ...] = ()
    """Ids of the samples."""
    spike: float = 0.0
    """By what; 0: not a number."""

    def within(self, weights: tuple[int, ...]) -> TaskConfig:
        """See `TaskConfig.within`."""
        return _Within(NextToken.within(self, weights), self)


@dataclass(frozen=True)
class _Within(TaskConfig):
    sound: TaskConfig
    poison: Poisoned

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """See `TaskConfig.loss`."""
        loss = self.sound.loss(model, batch)
        if set(self.poison.samples).isdisjoint(batch.sample_ids):
            return loss
        return Loss(sum=loss.sum * (self.poison.spike or math.nan), weight=loss.weight)

    def weight(self, batch: Batch) -> int:
        """See `TaskConfig.weight`."""
        return self.sound.weight(batch)
