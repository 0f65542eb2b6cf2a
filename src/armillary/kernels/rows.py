"""Row-by-row functions in pieces that stay in a core's cache."""

from __future__ import annotations

import torch
from torch import Tensor

_ELEMENTS = 1 << 19
"""Of a piece: its fp32 temporaries take 2 MiB each."""


def pieces(x: Tensor) -> list[slice]:
    """Slices of the first dim of x to work on one after the other.

    On a CPU, temporaries of a whole activation would go through memory and leave holes in the heap
    that raise the peak. A GPU, and a compiler that fuses, take everything at once.
    """
    rows = x.shape[0]
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return [slice(0, rows)]
    step = max(1, _ELEMENTS * rows // max(1, x.numel()))
    return [slice(begin, min(begin + step, rows)) for begin in range(0, rows, step)]
