"""Muon for matrices that may be sharded: the update is computed from the whole matrix.

torch's own Muon runs on DTensors too, but as sharded matrix products, whose sums have another
order, which bfloat16 amplifies, and which cost several collectives a matrix. Here each matrix's
momentum stays sharded like its parameter, the update is gathered once, orthogonalised on every
rank, and each rank keeps its own part; given the same gradients the result is the unsharded one,
bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.optimizer import ParamsT

_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of X <- a X + b (X Xᵀ) X + c (X Xᵀ)² X (Jordan et al. 2024)."""
_EPS = 1e-7


class GatheredMuon(torch.optim.Muon):
    """torch.optim.Muon, with the same groups and state, for plain and sharded matrices.

    Args:
        params: see torch.optim.Muon.
        ns_dtype: where the Newton-Schulz iterations run.
        options: the other arguments of torch.optim.Muon.
    """

    def __init__(
        self, params: ParamsT, *, ns_dtype: torch.dtype = torch.bfloat16, **options: Any
    ) -> None:
        super().__init__(params, **options)
        self._ns_dtype = ns_dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every matrix that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        whole = update.full_tensor() if isinstance(update, DTensor) else update
        direction = orthogonalise(whole, steps=group["ns_steps"], dtype=self._ns_dtype)
        if isinstance(parameter, DTensor):
            direction = distribute_tensor(
                direction, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        rate = group["lr"]
        parameter.mul_(1 - rate * group["weight_decay"])
        parameter.add_(direction, alpha=-rate * _adjustment(group["adjust_lr_fn"], parameter.shape))


def orthogonalise(matrix: Tensor, *, steps: int, dtype: torch.dtype) -> Tensor:
    """About U Vᵀ for a matrix U S Vᵀ, by `steps` Newton-Schulz iterations; singular values end
    near 1, not at it, which serves as well and is quicker (Jordan et al. 2024).
    """
    a, b, c = _QUINTIC
    x = matrix.to(dtype, copy=True)  # [A, B]
    tall = matrix.size(0) > matrix.size(1)
    if tall:
        x = x.T
    x.div_(x.norm().clamp(min=_EPS))  # the largest singular value is at most 1
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if tall else x


def _adjustment(kind: str | None, shape: torch.Size) -> float:
    rows, columns = shape
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
