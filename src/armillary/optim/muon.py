"""Muon for the matrices of the blocks, AdamW for everything else.

Muon replaces a matrix's momentum by the nearest semi-orthogonal matrix (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/; scaling across shapes: Liu et al. 2025, "Muon is
scalable for LLM training", arXiv 2502.16982).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from armillary.foundation.component import component
from armillary.foundation.errors import Problem, UserError
from armillary.foundation.patterns import matches, pattern_problems
from armillary.optim.adamw import adamw_checks, build_adamw
from armillary.optim.config import OptimizerConfig
from armillary.optim.groups import (
    NO_DECAY,
    Named,
    named_parameters,
    range_problems,
    split_by_decay,
    whole_shapes,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from armillary.optim.optimizers import Optimizers

Adjustment = Literal["match_rms_adamw", "original"]
IterationDtype = Literal["bfloat16", "float32"]


@component("muon")
@dataclass(frozen=True, kw_only=True, slots=True)
class Muon(OptimizerConfig):
    """Orthogonalised momentum for the matrices of the blocks, AdamW for the rest."""

    lr: float = 2e-3
    """Peak learning rate of the matrices, before `adjust_lr`."""
    momentum: float = 0.95
    """Decay of the momentum per step, in [0, 1)."""
    nesterov: bool = True
    """Look one step ahead along the momentum."""
    weight_decay: float = 0.1
    """Share of a weight that decays per step and unit of learning rate, matrices and the rest."""
    adjust_lr: Adjustment = "match_rms_adamw"
    """Factor for a matrix of A rows and B columns: match_rms_adamw is 0.2 sqrt(max(A, B)), so that
    rates of AdamW can be kept; original is sqrt(max(1, A / B))."""
    ns_steps: int = 5
    """Newton-Schulz iterations."""
    ns_dtype: IterationDtype = "bfloat16"
    """Where the iterations run: bfloat16, as published, or float32, which a run needs whose losses
    shall not depend on the mesh beyond float32's own rounding."""
    matrices: tuple[str, ...] = ("layers.*",)
    """Shell-style patterns of the parameters that Muon updates, of those that are matrices: two
    dims, or three for the matrices of experts side by side, and no bias."""
    adamw_lr: float = 2e-3
    """Peak learning rate of everything else."""
    adamw_betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay of the first and second moment per step, in [0, 1)."""
    adamw_eps: float = 1e-8
    """AdamW's eps."""
    no_decay: tuple[str, ...] = NO_DECAY
    """Shell-style patterns of the parameters without decay: norms, biases and embeddings."""

    def problems(self) -> list[Problem]:
        """See `OptimizerConfig.problems`."""
        return range_problems(
            [
                ("optimizer.lr", self.lr, self.lr > 0, "a number above 0"),
                ("optimizer.momentum", self.momentum, 0 <= self.momentum < 1, "in [0, 1)"),
                ("optimizer.ns_steps", self.ns_steps, 1 <= self.ns_steps < 100, "1 to 99"),
                (
                    "optimizer.adjust_lr",
                    self.adjust_lr,
                    self.adjust_lr in get_args(Adjustment),
                    ", ".join(get_args(Adjustment)),
                ),
                (
                    "optimizer.ns_dtype",
                    self.ns_dtype,
                    self.ns_dtype in get_args(IterationDtype),
                    ", ".join(get_args(IterationDtype)),
                ),
                ("optimizer.adamw_lr", self.adamw_lr, self.adamw_lr > 0, "a number above 0"),
                *adamw_checks("optimizer.adamw_", self.adamw_betas, self.adamw_eps, 0.0),
                (
                    "optimizer.weight_decay",
                    self.weight_decay,
                    self.weight_decay >= 0,
                    "0 or more",
                ),
            ]
        )

    def build(self, model: Named) -> Optimizers:
        """See `OptimizerConfig.build`."""
        from armillary.optim.optimizers import Optimizers

        shapes = whole_shapes(model)
        candidates = [name for name, shape in shapes.items() if is_matrix(name, shape)]
        problems = [
            *self.problems(),
            *pattern_problems("optimizer.matrices", self.matrices, candidates, ()),
            *pattern_problems("optimizer.no-decay", self.no_decay, list(shapes), NO_DECAY),
        ]
        if problems:
            raise UserError(problems)
        chosen = {name for name in candidates if matches(name, self.matrices)}
        named = named_parameters(model)
        matrices = {name: p for name, p in named.items() if name in chosen}
        rest = {name: p for name, p in named.items() if name not in chosen}
        optimizers: list[torch.optim.Optimizer] = []
        if matrices:
            optimizers.append(self._muon(model, matrices))
        if rest:
            groups = split_by_decay(rest, self.no_decay, self.weight_decay)
            optimizers.append(
                build_adamw(groups, lr=self.adamw_lr, betas=self.adamw_betas, eps=self.adamw_eps)
            )
        return Optimizers(optimizers, rate=self.lr)

    def _muon(self, model: Named, matrices: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        import torch

        from armillary.optim.gathered_muon import GatheredMuon, Held, Whole

        return GatheredMuon(
            [
                {"params": group.parameters, "weight_decay": group.weight_decay}
                for group in split_by_decay(matrices, self.no_decay, self.weight_decay)
            ],
            names={parameter: name for name, parameter in matrices.items()},
            held=model if isinstance(model, Held) else Whole(),
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            ns_steps=self.ns_steps,
            adjust_lr_fn=self.adjust_lr,
            ns_dtype=getattr(torch, self.ns_dtype),
        )


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter is a matrix or a stack of them, by the shape of the whole."""
    return len(shape) in (2, 3) and not name.endswith("bias")
