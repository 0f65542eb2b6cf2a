"""Modules built on `meta` whose weights are in memory only while they are used."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from armillary.checkpoint.hugging_face.source import Sources, read_all


def lend(module: nn.Module, prefix: str, sources: Sources) -> None:
    """From now on each module below reads its own weights when it is called, and forgets them.

    Args:
        module: on `meta`; in place.
        prefix: of its names among the sources.
        sources: weights by name.
    """
    for path, each in module.named_modules():
        own = [name for name, _ in each.named_parameters(recurse=False)]
        own += [name for name, buffer in each.named_buffers(recurse=False) if buffer is not None]
        if own:
            where = ".".join(part for part in (prefix, path) if part)
            _lend_one(each, {name: f"{where}.{name}" for name in own}, sources)


def _lend_one(module: nn.Module, names: dict[str, str], sources: Sources) -> None:
    def take(module: nn.Module, *args: Any) -> None:
        for own, name in names.items():
            _put(module, own, read_all(sources[name]).float())

    def give_back(module: nn.Module, *args: Any) -> None:
        for own, name in names.items():
            _put(module, own, torch.empty(sources[name].shape, device="meta"))

    module.register_forward_pre_hook(take)
    module.register_forward_hook(give_back)


def _put(module: nn.Module, name: str, value: torch.Tensor) -> None:
    if name in module._buffers:
        setattr(module, name, value)
    else:
        setattr(module, name, nn.Parameter(value, requires_grad=False))
