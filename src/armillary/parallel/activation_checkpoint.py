"""The pass that trades activation memory for recomputation."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from armillary.foundation.errors import UserError
from armillary.models.layers.end_step import layers_that_end_steps
from armillary.models.layers.recompute import recompute_contexts
from armillary.parallel.activation_checkpoint_config import ActivationCheckpointConfig
from armillary.parallel.blocks import blocks_of
from armillary.parallel.operators import operators_named
from armillary.parallel.selective import keeping_contexts


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
    for name, block in model.layers.items():  # type: ignore[operator, union-attr]
        kept = config.kept(int(name))  # a stage's blocks keep their numbers
        if kept is not None:
            block.forward = _checkpointed(block.forward, kept, counts=_counts(block))


def offload_activations(model: nn.Module, config: ActivationCheckpointConfig) -> None:
    """Makes each block keep in host memory what it keeps, if `config` says so.

    In place. After compilation: the hooks that move tensors stand around the compiled block, which
    could not be one graph with them inside.
    """
    for block in blocks_of(model) if config.offloads else []:
        block.forward = _offloaded(block.forward)


def _counts(block: nn.Module) -> bool:
    """Whether a forward pass leaves something behind that its repetition must not double."""
    return bool(layers_that_end_steps(block.modules()))


def _checkpointed(
    forward: Callable[..., Any], kept: tuple[str, ...], *, counts: bool
) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False}
    if kept or counts:
        options["context_fn"] = _contexts(kept, counts)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **options, **kwargs)

    return run


@cache
def _contexts(kept: tuple[str, ...], counts: bool) -> Callable[[], Any]:
    """One object for all blocks that keep the same, so that they share one compilation."""
    if not kept:
        return recompute_contexts
    operators = frozenset(operators_named(kept))
    if counts:
        return partial(keeping_contexts, operators)
    return partial(create_selective_checkpoint_contexts, partial(_policy, operators))


def _policy(
    operators: frozenset[object], context: object, operator: object, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    if operator in operators:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _offloaded(forward: Callable[..., Any]) -> Callable[..., Any]:
    """What autograd saves inside goes to host memory and comes back when it is needed.

    Weights stay: they are on the device anyway, or data sharding gathers them again.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with torch.autograd.graph.saved_tensors_hooks(_to_host, _from_host):
            return forward(*args, **kwargs)

    return run


Packed = tuple[Tensor, torch.device]


def _to_host(tensor: Tensor) -> Packed:
    owner = tensor if tensor._base is None else tensor._base
    if isinstance(owner, nn.Parameter) or not tensor.is_floating_point():
        return tensor, tensor.device
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    host.copy_(tensor, non_blocking=tensor.is_cuda)
    return host, tensor.device


def _from_host(packed: Packed) -> Tensor:
    tensor, device = packed
    return tensor.to(device, non_blocking=True)
