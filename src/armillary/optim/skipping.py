"""An update that the device itself leaves out: torch's own protocol for it, in one place.

`torch.amp.GradScaler` has optimizers that say `_step_supports_amp_scaling` read the attributes
`grad_scale` and `found_inf` in `step`; fused Adam and AdamW do, and so does `GatheredMuon`. A
`found_inf` of 1 leaves parameters, moments and counts of steps as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

SUPPORTED = "_step_supports_amp_scaling"
"""What an optimizer has, and is true, that reads `found_inf`."""


def can_skip(optimizer: Optimizer) -> bool:
    """Whether an optimizer takes part, on the device where its parameters are."""
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    return bool(getattr(optimizer, SUPPORTED, False)) and len(devices) == 1


def step_unless(skipped: Tensor, optimizer: Optimizer) -> None:
    """`optimizer.step()`, of which nothing is left where `skipped`, [] bool, is true."""
    assert can_skip(optimizer), type(optimizer).__name__
    scaled: Any = optimizer
    scaled.grad_scale, scaled.found_inf = None, skipped.to(torch.float32)
    try:
        optimizer.step()
    finally:
        del scaled.grad_scale, scaled.found_inf
