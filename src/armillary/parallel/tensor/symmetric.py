"""The adapter to torch's fused operators over symmetric memory, which peers read.

They multiply one rank's tokens while copy engines fetch the next rank's. They exist for CUDA only,
and only within one machine; elsewhere `decomposed` does the same over messages.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from armillary.parallel import process
from armillary.parallel.collectives import resolve_size


def is_usable(x: Tensor, group: str) -> bool:
    """Whether the fused operators serve this tensor and group; all ranks of the group agree."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and _reaches(group)


def gather_and_multiply(
    x: Tensor, weights: list[Tensor], group: str
) -> tuple[Tensor, list[Tensor]]:
    """Share `[..., S/R, D]` and weights `[O, D]` -> whole rows, and their products."""
    factors = [weight.mT for weight in weights]
    gathered, products = _operators().fused_all_gather_matmul(x, factors, x.dim() - 2, group)
    return gathered, list(products)


def multiply_and_scatter(xs: list[Tensor], weights: list[Tensor], group: str) -> Tensor:
    """Σ x wᵀ of x `[..., S, F]` and w `[O, F]`, summed over ranks -> this one's `[..., S/R, O]`."""
    x, weight = (xs[0], weights[0]) if len(xs) == 1 else (torch.cat(xs, -1), torch.cat(weights, -1))
    out: Tensor = _operators().fused_matmul_reduce_scatter(x, weight.mT, "sum", x.dim() - 2, group)
    return out


@cache
def _reaches(group: str) -> bool:
    """Whether the ranks of a group are on one machine. Ranks that share matrices are neighbours."""
    return process.local_world_size() % resolve_size(group) == 0 and hasattr(
        _operators(), "fused_all_gather_matmul"
    )


def _operators() -> Any:
    import torch.distributed._symmetric_memory  # defines the operators

    return torch.ops.symm_mem
