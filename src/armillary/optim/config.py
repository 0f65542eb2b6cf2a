"""The optimizer slot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from armillary.foundation.component import Component
from armillary.foundation.errors import Problem

if TYPE_CHECKING:
    from torch import nn

    from armillary.optim.optimizers import Optimizers


class OptimizerConfig(Component, ABC):
    """How parameters move along their gradients."""

    __slots__ = ()

    @abstractmethod
    def problems(self) -> list[Problem]:
        """What is wrong with the values, whatever the model."""

    @abstractmethod
    def build(self, model: nn.Module) -> Optimizers:
        """The optimizers of a model, whose parameters may be sharded already.

        Raises:
            UserError: a value is out of range, or a pattern matches no parameter.
        """
