"""Muon for matrices of which a rank holds a part: the update is computed from the whole matrix.

Each matrix's momentum is kept cut like its parameter, the update is gathered once, orthogonalised
on every rank, and each rank keeps its own part. Given the same gradients the result is that of
torch.optim.Muon on whole matrices, bit for bit; computed as products of parts it would have sums in
another order, which bfloat16 amplifies. Stacks of matrices, experts side by side, are gathered no
further than each matrix needs: experts on different ranks stay there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of X <- a X + b (X Xᵀ) X + c (X Xᵀ)² X (Jordan et al. 2024)."""
_EPS = 1e-7


@runtime_checkable
class Held(Protocol):
    """A model that knows what part of each parameter is here; `ParallelModel` is one."""

    def gather(self, name: str, tensor: Tensor, *, stacked: bool = False) -> Tensor:
        """The whole of what is cut like a parameter; of a stack, each matrix that is here."""

    def own_part(self, name: str, whole: Tensor, *, stacked: bool = False) -> Tensor:
        """Of what `gather` gave, the part that is here."""


class Whole:
    """`Held` where everything is here."""

    def gather(self, name: str, tensor: Tensor, *, stacked: bool = False) -> Tensor:
        """See `Held.gather`."""
        return tensor

    def own_part(self, name: str, whole: Tensor, *, stacked: bool = False) -> Tensor:
        """See `Held.own_part`."""
        return whole


class GatheredMuon(torch.optim.Optimizer):
    """torch.optim.Muon, with the same groups and state, for any part of matrices and stacks.

    Args:
        params: groups of parameters of two dims, or three for stacks of matrices.
        names: their names in the model.
        held: what part of them is here.
        lr: learning rate.
        momentum: decay of the momentum per step.
        nesterov: look one step ahead along the momentum.
        weight_decay: share of a weight that decays per step and unit of learning rate.
        ns_steps: Newton-Schulz iterations.
        ns_dtype: where they run.
        adjust_lr_fn: match_rms_adamw or original, see `optim.muon.Muon.adjust_lr`.
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        names: Mapping[Tensor, str],
        held: Held,
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        ns_steps: int = 5,
        ns_dtype: torch.dtype = torch.bfloat16,
        adjust_lr_fn: str = "original",
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, defaults)
        self._step_supports_amp_scaling = True  # see `optim.skipping`
        self._names, self._held, self._ns_dtype = names, held, ns_dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every matrix that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = getattr(self, "found_inf", None)
        skipped = None if found is None else found != 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, skipped)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any], skipped: Tensor | None) -> None:
        assert parameter.grad is not None
        state, gradient = self.state[parameter], _local(parameter.grad)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        momentum = _local(state["momentum_buffer"])
        if skipped is not None:  # towards itself, it stays where it is
            gradient = torch.where(skipped, momentum, gradient)
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        name, stacked = self._names[parameter], parameter.ndim == 3
        whole = self._held.gather(name, update, stacked=stacked)
        direction = orthogonalise(whole, steps=group["ns_steps"], dtype=self._ns_dtype)
        direction = self._held.own_part(name, direction, stacked=stacked)
        rate = group["lr"]
        local = _local(parameter)
        direction = direction.to(local.device)  # parameters may be kept off the device
        before = None if skipped is None else local.clone()
        local.mul_(1 - rate * group["weight_decay"])
        local.add_(direction, alpha=-rate * _adjustment(group["adjust_lr_fn"], whole.shape[-2:]))
        if skipped is not None and before is not None:
            local.copy_(torch.where(skipped, before, local))


def orthogonalise(matrix: Tensor, *, steps: int, dtype: torch.dtype) -> Tensor:
    """About U Vᵀ for a matrix U S Vᵀ, by `steps` Newton-Schulz iterations; singular values end
    near 1, not at it, which serves as well and is quicker (Jordan et al. 2024).

    Args:
        matrix: `[A, B]`, or `[E, A, B]` for E of them.
        steps: iterations.
        dtype: where they run.
    """
    a, b, c = _QUINTIC
    add_product = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    x = matrix.to(dtype, copy=True)
    tall = matrix.size(-2) > matrix.size(-1)
    if tall:
        x = x.mT
    # The largest singular value is at most 1.
    norm = x.norm() if matrix.ndim == 2 else x.norm(dim=(-2, -1), keepdim=True)
    x.div_(norm.clamp(min=_EPS))
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, polynomial, x, beta=a)
    return x.mT if tall else x


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _adjustment(kind: str, shape: torch.Size) -> float:
    rows, columns = shape
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
