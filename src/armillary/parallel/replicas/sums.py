"""The sums of one step over the groups: gradients, and small numbers with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from armillary.parallel.layout import local_tensor
from armillary.parallel.model import ParallelModel
from armillary.parallel.replicas.link import Link


def sum_numbers(link: Link, numbers: Sequence[int]) -> tuple[int, ...]:
    """Sums of integers over the groups.

    Raises:
        LinkBroken: a peer was lost.
    """
    total = torch.tensor(numbers, dtype=torch.int64)
    link.sum_([total])
    return tuple(int(each) for each in total.tolist())


@torch.no_grad()
def sum_step(link: Link, model: ParallelModel, further: Sequence[Tensor]) -> None:
    """Sums every gradient over the groups, and further tensors with them, in place.

    What layers counted in the step is summed as well, and left for `end_step`.

    A parameter that got a gradient in some group gets one in all; one that got none anywhere has
    none. Ranks of the same number hold the same part of the model, so nothing else is needed.

    Raises:
        LinkBroken: a peer was lost; the gradients hold anything.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    there = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
    link.sum_([there])
    gradients: list[Tensor] = []
    for parameter, count in zip(parameters, there.tolist(), strict=True):
        if count and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad is not None:
            gradients.append(local_tensor(parameter.grad))
    counts = model.take_counts()
    if counts is not None:
        further = [*further, counts]
    link.sum_([*further, *gradients])
    if counts is not None:
        model.add_counts(counts)
