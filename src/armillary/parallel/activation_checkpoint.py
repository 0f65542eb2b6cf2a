"""The pass that trades activation memory for recomputation."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from armillary.foundation.errors import UserError
from armillary.parallel.blocks import blocks_of
from armillary.parallel.config import ActivationCheckpointConfig
from armillary.parallel.operators import operators_named


def checkpoint_activations(model: nn.Module, config: ActivationCheckpointConfig) -> None:
    """Makes each block keep what `config` says and recompute the rest in the backward pass.

    In place. After the passes that rewrite modules (tensor, context), so that what they do is
    recomputed too; before compilation, which then sees the checkpointed block. The block's forward
    is replaced, not wrapped in a module, so that parameters keep their names.

    Raises:
        UserError: `config` names an operator that does not exist.
    """
    if problems := config.problems():
        raise UserError(problems)
    for index, block in enumerate(blocks_of(model)):
        kept = config.kept(index)
        if kept is not None:
            block.forward = _checkpointed(block.forward, kept)


def _checkpointed(forward: Callable[..., Any], kept: tuple[str, ...]) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False}
    if kept:
        options["context_fn"] = _contexts(kept)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **options, **kwargs)

    return run


@cache
def _contexts(kept: tuple[str, ...]) -> Callable[[], Any]:
    """One object for all blocks that keep the same, so that they share one compilation."""
    return partial(
        create_selective_checkpoint_contexts, partial(_policy, frozenset(operators_named(kept)))
    )


def _policy(
    operators: frozenset[object], context: object, operator: object, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    if operator in operators:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
