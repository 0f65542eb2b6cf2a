"""What the passes know about a model: its blocks, and the weights that modules share."""

from __future__ import annotations

from torch import nn


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model, or of a part of one, in order: the children of `layers`."""
    layers = getattr(model, "layers", None)
    assert isinstance(layers, nn.ModuleDict), f"{type(model).__name__}.layers is no ModuleDict"
    return list(layers.values())


def modules_around_blocks(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """The other direct children of a model that hold parameters: those before `layers`, after."""
    names = [name for name, _ in model.named_children()]
    split = names.index("layers")
    children = [
        (position, child)
        for position, (name, child) in enumerate(model.named_children())
        if name != "layers" and next(child.parameters(), None) is not None
    ]
    return (
        [child for position, child in children if position < split],
        [child for position, child in children if position > split],
    )


def tied_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The places (module, attribute) of each parameter that stands in more than one of them."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    return [found for found in places.values() if len(found) > 1]
