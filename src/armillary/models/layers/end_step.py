"""What layers do once a step, after the optimizer, with what they counted in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

Total = Callable[[Tensor], Tensor]
"""Sums a tensor over all ranks that saw other tokens."""


@runtime_checkable
class EndsStep(Protocol):
    """A layer that counts in training and acts on the counts of a whole step; of any kind.

    Its counts are of forward passes, and not of their repetitions: see `recompute.recomputing`.
    """

    statistics: tuple[str, ...]
    """Names of all that it may report: known before the first step, on ranks without it too."""

    def take_counts(self) -> Tensor:
        """`[n]` int64, what was counted since this was last asked; starts again from 0."""

    def end_step(self, counts: Tensor) -> Mapping[str, Tensor]:
        """Acts on the counts of all ranks; what there is to report, by name, as scalars."""


def layers_that_end_steps(modules: Iterable[nn.Module]) -> list[EndsStep]:
    """Those of the modules that want to be called once a step, each once, in their order."""
    found: list[EndsStep] = []
    for module in modules:
        if hasattr(module, "end_step"):
            assert isinstance(module, EndsStep), f"{type(module).__name__} is half of an EndsStep"
            found.append(module)
    return found


@torch.no_grad()
def end_step(
    layers: Sequence[EndsStep],
    total: Total,
    names: Sequence[str],
    device: torch.device,
    skipped: Tensor | None = None,
) -> Tensor:
    """Ends a step in all layers. Every rank calls it after each step, whether it saw tokens or not.

    One sum over ranks serves all layers, and nothing waits for the device.

    Args:
        layers: those that are here.
        total: called once, unless there are no layers.
        names: of statistics.
        device: where the result is wanted.
        skipped: [] bool, whether the step shall change nothing: counts start again from 0, and
            that is all. None: it counts.

    Returns:
        `[len(names)]` fp32, the largest value of each statistic over the layers that are here;
        -inf where none reports it.
    """
    largest = torch.full((len(names),), -math.inf, device=device)
    if not layers:
        return largest
    counts = [layer.take_counts() for layer in layers]
    totals = torch.split(total(torch.cat(counts)), [count.numel() for count in counts])
    reports = [
        _end_step(layer, count, skipped) for layer, count in zip(layers, totals, strict=True)
    ]
    for index, name in enumerate(names):
        if values := [report[name] for report in reports if name in report]:
            largest[index] = torch.stack(values).max()
    return largest


def _end_step(layer: EndsStep, counts: Tensor, skipped: Tensor | None) -> Mapping[str, Tensor]:
    """`EndsStep.end_step`, whose changes of the layer's buffers a skipped step undoes."""
    if skipped is None:
        return layer.end_step(counts)
    assert isinstance(layer, nn.Module)
    before = [(buffer, buffer.clone()) for buffer in layer.buffers()]
    report = layer.end_step(counts)
    for buffer, old in before:
        buffer.copy_(torch.where(skipped, old, buffer))
    return report
