"""What becomes of the weights at the end of a round, in which each group went its own way.

The mean over the groups is of what they did: a group that came in the meantime counts as nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from armillary.parallel.layout import local_tensor
from armillary.parallel.model import ParallelModel
from armillary.parallel.replicas.config import DiLoCo, Replicas
from armillary.parallel.replicas.link import Link


class Outer:
    """The mean of the weights: local SGD. (Stich 2018, arXiv 1805.09767, algorithm 1)

    Floating-point buffers that are part of the model, biases of routers, are averaged as well.

    Args:
        model: on this rank, its weights those that all groups start from.
    """

    def __init__(self, model: ParallelModel) -> None:
        self._model = model

    def state(self) -> dict[str, Tensor]:
        """What is remembered between rounds, live, as `KIND.PARAMETER`: views of the whole."""
        return {}

    def restart(self) -> None:
        """The weights are others, those that all groups start from."""

    @torch.no_grad()
    def mean(self, link: Link, weight: float) -> list[Tensor]:
        """The mean over groups of what `apply` needs; changes nothing.

        Args:
            link: to the groups; all call this.
            weight: of this group: 0 where it took no part in the round.

        Raises:
            LinkBroken: a peer was lost.
        """
        total = torch.tensor([weight], dtype=torch.float64)
        own = [value * weight for value in self._values()]
        link.sum_([total])
        link.sum_(own)
        assert total > 0, "a round without any group that took part in it"
        return [value.div_(float(total)) for value in own]

    @torch.no_grad()
    def apply(self, means: Sequence[Tensor]) -> None:
        """Sets the weights, given what `mean` returned."""
        for tensor, mean in zip(self._tensors().values(), means, strict=True):
            tensor.copy_(mean)

    def _values(self) -> list[Tensor]:
        return list(self._tensors().values())

    def _tensors(self) -> dict[str, Tensor]:
        named = self._model.state_dict()
        return {
            name: local_tensor(tensor.detach())
            for name, tensor in named.items()
            if tensor.is_floating_point() and name not in self._model.whole.frozen
        }


class Nesterov(Outer):
    """SGD with Nesterov momentum over the mean way of the groups.

    With anchor a (the weights that a round began with), weights w of a group, and the mean over
    groups of a - w as the gradient d: m <- mu m + d, a <- a - lr (d + mu m), w <- a.
    (Douillard et al. 2023, arXiv 2311.08105, algorithm 1)
    """

    def __init__(self, model: ParallelModel, *, lr: float, momentum: float) -> None:
        super().__init__(model)
        self._lr, self._momentum = lr, momentum
        self.restart()

    def restart(self) -> None:
        """See `Outer.restart`."""
        tensors = self._tensors()
        self._anchors = {name: tensor.clone() for name, tensor in tensors.items()}
        self._moments = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}

    def state(self) -> dict[str, Tensor]:
        """See `Outer.state`."""
        kinds = {"anchor": self._anchors, "momentum": self._moments}
        return {
            f"{kind}.{name}": self._model.whole_view(name, tensor)
            for kind, tensors in kinds.items()
            for name, tensor in tensors.items()
        }

    @torch.no_grad()
    def apply(self, means: Sequence[Tensor]) -> None:
        """See `Outer.apply`."""
        for (name, tensor), way in zip(self._tensors().items(), means, strict=True):
            moment, anchor = self._moments[name], self._anchors[name]
            moment.mul_(self._momentum).add_(way)
            anchor.sub_(way + self._momentum * moment, alpha=self._lr)
            tensor.copy_(anchor)

    def _values(self) -> list[Tensor]:
        return [self._anchors[name] - tensor for name, tensor in self._tensors().items()]


def build_outer(replicas: Replicas, model: ParallelModel) -> Outer:
    """What ends the rounds of a mode; where there are none it is not asked, and remembers nothing.

    To be called when the weights are those that all groups start from.
    """
    mode = replicas.mode
    if isinstance(mode, DiLoCo) and not replicas.alone:
        return Nesterov(model, lr=mode.lr, momentum=mode.momentum)
    return Outer(model)
