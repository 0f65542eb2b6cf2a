"""The pass that sets the format in which a model computes."""

from __future__ import annotations

import torch
from torch import nn


def set_compute_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Makes the model compute in `dtype` while its weights stay float32. First in order, in place.

    The embedding's output sets the format of the residual stream, and linear layers and norms round
    their weights to that of their input. One process and sharded ranks thus follow one policy:
    sharding rounds the weights of blocks to the same format, only earlier, and leaves the others to
    the layers.

    Raises:
        AssertionError: no module of the model declares `output_dtype`.
    """
    sources = [module for module in model.modules() if hasattr(module, "output_dtype")]
    assert sources, f"no module of {type(model).__name__} declares output_dtype"
    for module in sources:
        module.output_dtype = dtype  # type: ignore[assignment]  # nn.Module types it as a module
