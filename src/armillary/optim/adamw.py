"""AdamW: Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv 1711.05101)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from armillary.foundation.component import component
from armillary.foundation.errors import Problem, UserError
from armillary.foundation.patterns import pattern_problems
from armillary.optim.config import OptimizerConfig
from armillary.optim.groups import (
    NO_DECAY,
    Group,
    Named,
    named_parameters,
    range_problems,
    split_by_decay,
    whole_shapes,
)

if TYPE_CHECKING:
    import torch

    from armillary.optim.optimizers import Optimizers


FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")
"""Kinds of device that every supported torch has a fused AdamW for."""


@component("adamw")
@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW(OptimizerConfig):
    """Adam with decoupled weight decay, fused where torch has it; moments in float32."""

    lr: float = 1e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment per step, in [0, 1)."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Share of a weight that decays per step and unit of learning rate."""
    no_decay: tuple[str, ...] = NO_DECAY
    """Shell-style patterns of the parameters without decay: norms, biases and embeddings."""

    def problems(self) -> list[Problem]:
        """See `OptimizerConfig.problems`."""
        return range_problems(
            [
                ("optimizer.lr", self.lr, self.lr > 0, "a number above 0"),
                *adamw_checks("optimizer.", self.betas, self.eps, self.weight_decay),
            ]
        )

    def build(self, model: Named) -> Optimizers:
        """See `OptimizerConfig.build`."""
        from armillary.optim.optimizers import Optimizers

        problems = self.problems() + pattern_problems(
            "optimizer.no-decay", self.no_decay, list(whole_shapes(model)), NO_DECAY
        )
        if problems:
            raise UserError(problems)
        groups = split_by_decay(named_parameters(model), self.no_decay, self.weight_decay)
        optimizers = []
        if groups:  # a stage of a pipeline may train nothing
            optimizers.append(build_adamw(groups, lr=self.lr, betas=self.betas, eps=self.eps))
        return Optimizers(optimizers, rate=self.lr)


def adamw_checks(
    prefix: str, betas: tuple[float, float], eps: float, weight_decay: float
) -> list[tuple[str, object, bool, str]]:
    """What must hold for AdamW's values."""
    in_range = all(0.0 <= beta < 1.0 for beta in betas)
    return [
        (f"{prefix}betas", betas, in_range, "two numbers in [0, 1)"),
        (f"{prefix}eps", eps, eps > 0, "a number above 0"),
        (f"{prefix}weight_decay", weight_decay, weight_decay >= 0, "0 or more"),
    ]


def build_adamw(
    groups: Sequence[Group], *, lr: float, betas: tuple[float, float], eps: float
) -> torch.optim.AdamW:
    """torch's AdamW, with the fused implementation where the parameters' device has one."""
    import torch

    parameters = [parameter for group in groups for parameter in group.parameters]
    return torch.optim.AdamW(
        [{"params": g.parameters, "weight_decay": g.weight_decay} for g in groups],
        lr=lr,
        betas=betas,
        eps=eps,
        fused=_has_fused(parameters),
    )


def _has_fused(parameters: Sequence[torch.Tensor]) -> bool:
    return all(p.device.type in FUSED_DEVICES and p.is_floating_point() for p in parameters)
