"""What the passes know about a model: its blocks, and the weights that modules share."""

from __future__ import annotations

from torch import nn


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model, in order: the children of its `layers`."""
    layers = getattr(model, "layers", None)
    assert isinstance(layers, nn.ModuleDict), f"{type(model).__name__}.layers is no ModuleDict"
    return list(layers.values())


def modules_outside_blocks(model: nn.Module) -> list[nn.Module]:
    """The direct children of a model that hold parameters, without its `layers`, in order."""
    return [
        child
        for name, child in model.named_children()
        if name != "layers" and next(child.parameters(), None) is not None
    ]


def tied_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The places (module, attribute) of each parameter that stands in more than one of them."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    return [found for found in places.values() if len(found) > 1]
