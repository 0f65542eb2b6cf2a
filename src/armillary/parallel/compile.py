"""The pass that compiles a model, block by block."""

from __future__ import annotations

from typing import Any

import torch
import torch._functorch.config
from torch import nn

from armillary.parallel.blocks import blocks_of
from armillary.parallel.config import Compile


def compile_blocks(
    model: nn.Module, config: Compile, *, memory_budget: float | None = None
) -> None:
    """Compiles the forward of each block, as one graph without breaks.

    In place. After activation checkpointing, so that the compiler sees what is recomputed; before
    data sharding, whose hooks then run around the compiled code. Blocks of one shape share one
    compilation, so it takes as long for 80 blocks as for one. Of a block that routes tokens to
    experts only the attention is compiled: how many tokens an expert gets is known on the host, so
    the rest would break the graph anyway.

    Args:
        memory_budget: Share of a block's activations that the compiler may keep; None: its choice.
    """
    if not config.enabled:
        return
    set_memory_budget(1.0 if memory_budget is None else memory_budget)
    options: dict[str, Any] = {"backend": config.backend, "fullgraph": True}
    if config.mode != "default":
        options["mode"] = config.mode
    for block in blocks_of(model):
        module = block.attention if _routes(block) else block
        module.forward = torch.compile(module.forward, **options)  # type: ignore[union-attr]


def forget_compiled(config: Compile) -> None:
    """Lets go of all code, for models to come: those are compiled as in a new process.

    Rows of another length would else be compiled for any length.
    """
    if config.enabled:
        torch.compiler.reset()


def _routes(block: nn.Module) -> bool:
    return any(hasattr(module, "dispatch") for module in block.modules())


def set_memory_budget(share: float) -> None:
    """Sets what the partitioner of the whole process keeps; torch has no public way to say so."""
    torch._functorch.config.activation_memory_budget = share
