"""The one place that knows how each version of torch spells a product of 8-bit matrices.

`torch.nn.functional.scaled_mm` is public from torch 2.10 on; `torch._scaled_mm`, private, has been
there for longer and is the only other choice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_PUBLIC: Any = getattr(torch.nn.functional, "scaled_mm", None)
_SCALING: Any = getattr(torch.nn.functional, "ScalingType", None)


def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, *, fast: bool
) -> Tensor:
    """(a scale_a) (b scale_b).

    Args:
        a: float8 `[M, K]`, rows contiguous; K a multiple of 16.
        b: float8 `[K, N]`, columns contiguous; N a multiple of 16.
        scale_a: fp32 `[M, 1]`, or `[]` where that of b is.
        scale_b: fp32 `[1, N]`, or `[]` where that of a is.
        dtype: of the result.
        fast: let the GPU add up with fewer bits than fp32 has.
    """
    if _PUBLIC is None or _SCALING is None:
        out: Tensor = torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=dtype, use_fast_accum=fast)
        return out
    kind = _SCALING.TensorWise if scale_a.dim() == 0 else _SCALING.RowWise
    result: Tensor = _PUBLIC(
        a, b, scale_a, kind, scale_b, kind, output_dtype=dtype, use_fast_accum=fast
    )
    return result
