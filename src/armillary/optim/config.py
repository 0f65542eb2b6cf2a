"""The optimizer slot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from armillary.foundation.component import Component
from armillary.foundation.errors import Problem

if TYPE_CHECKING:
    from armillary.optim.groups import Named
    from armillary.optim.optimizers import Optimizers


class OptimizerConfig(Component, ABC):
    """How parameters move along their gradients."""

    __slots__ = ()

    @abstractmethod
    def problems(self) -> list[Problem]:
        """What is wrong with the values, whatever the model."""

    @abstractmethod
    def build(self, model: Named) -> Optimizers:
        """The optimizers of what this rank holds of a model, all passes and first weights behind.

        Raises:
            UserError: a value is out of range, or a pattern matches no parameter.
        """
