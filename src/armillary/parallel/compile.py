"""The pass that compiles a model, block by block."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from armillary.parallel.blocks import blocks_of
from armillary.parallel.config import Compile


def compile_blocks(model: nn.Module, config: Compile) -> None:
    """Compiles the forward of each block, as one graph without breaks.

    In place. After activation checkpointing, so that the compiler sees what is recomputed; before
    data sharding, whose hooks then run around the compiled code. Blocks of one shape share one
    compilation, so it takes as long for 80 blocks as for one.
    """
    if not config.enabled:
        return
    options: dict[str, Any] = {"backend": config.backend, "fullgraph": True}
    if config.mode != "default":
        options["mode"] = config.mode
    for block in blocks_of(model):
        block.forward = torch.compile(block.forward, **options)
