"""The pass that splits matrices over ranks, and tokens between the regions that they form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from armillary.models.layers.embedding import Embedding, Head
from armillary.models.layers.linear import Linear
from armillary.parallel.collectives import group_name
from armillary.parallel.layout import Layouts, split_parameter
from armillary.parallel.mesh import Mesh
from armillary.parallel.tensor.asynchronous import overlap_region
from armillary.parallel.tensor.region import (
    TensorRanks,
    declared_linears,
    declared_splits,
    product_input,
)
from armillary.parallel.tensor.vocabulary import split_embedding, split_head

AXIS = "tp"

_LINEAR_DIMS = {
    "outputs": {"weight": 0, "bias": 0, "lora_b": 0},
    "inputs": {"weight": 1, "lora_a": 1},
}
"""By how a Linear is split, the dim that is cut of each parameter that it may have."""


def split_tensors(model: nn.Module, mesh: Mesh, layouts: Layouts) -> None:
    """Splits what modules declare to be splittable over the axis `tp`.

    In place, on `meta`; after experts, before context and everything that wraps forwards. Three
    declarations are read, all plain data on modules:

    - `tensor_region`: the module takes whole rows `[..., S, D]` and returns partial sums. Rows are
      gathered on the way in; the sums are made and shared out on the way out.
    - `tensor_split`: names of what is inside a region, to "outputs" (of a Linear: each rank
      computes some), "inputs" (each rank multiplies some and the products are partial sums) or
      "heads" (a plain parameter, dim 0). (Shoeybi et al. 2019, arXiv 1909.08053, section 3)
    - `vocabulary_split`: an embedding or a head, cut by vocabulary, which need not divide.

    All other parameters are whole on each rank, which sees only some tokens or some heads: their
    gradients are partial sums, which the layouts record.
    """
    if mesh.degree(AXIS) == 1:
        return
    ranks = TensorRanks(group_name(mesh.group(AXIS)), mesh.degree(AXIS), mesh.coordinate(AXIS))
    _follow_sequence(model, ranks)
    for prefix, region in _declaring(model, "tensor_region"):
        _split_region(prefix, region, mesh, layouts)
        if not (mesh.parallel.asynchronous_tp and overlap_region(region, ranks)):
            _surround(region, ranks)
    for prefix, module in _declaring(model, "vocabulary_split"):
        split_parameter(module, "weight", f"{prefix}.weight", layouts, mesh, axis=AXIS, dim=0)
        whole = layouts.layout(f"{prefix}.weight").shape[0]
        if isinstance(module, Head):
            split_head(module, ranks, whole)
        else:
            assert isinstance(module, Embedding), f"{prefix} is neither embedding nor head"
            split_embedding(module, ranks, whole)
    for parameter, _ in model.named_parameters():
        layout = layouts.layout(parameter)
        if AXIS not in layout.split_axes and layout.view != "expert":
            layouts.mark_partial(parameter, AXIS)


def _declaring(model: nn.Module, declaration: str) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if getattr(module, declaration, False):
            yield name, module


def _split_region(prefix: str, region: nn.Module, mesh: Mesh, layouts: Layouts) -> None:
    for path, kind in declared_splits(region).items():
        dims = {path: 0}
        if kind != "heads":
            dims = {f"{path}.{attribute}": dim for attribute, dim in _LINEAR_DIMS[kind].items()}
        for name, dim in dims.items():
            owner, _, attribute = name.rpartition(".")
            module = region.get_submodule(owner)
            if getattr(module, attribute, None) is None:
                continue  # an optional parameter that this model does without
            size = module.get_parameter(attribute).shape[dim]
            full_name = f"{prefix}.{name}"
            assert size % mesh.degree(AXIS) == 0, f"{full_name}: {size} on {mesh.degree(AXIS)}"
            split_parameter(module, attribute, full_name, layouts, mesh, axis=AXIS, dim=dim)


def _follow_sequence(model: nn.Module, ranks: TensorRanks) -> None:
    """Decides at the start of each forward pass whether tokens are split, whatever part this is."""
    original: Callable[..., Any] = model.context  # type: ignore[assignment]

    def context(tokens: Tensor, documents: Any, cache: Any = None) -> Any:
        training = model.training and torch.is_grad_enabled()
        ranks.begin(tokens.shape[1], cached=cache is not None, training=training)
        return original(tokens, documents, cache)

    model.context = context  # type: ignore[assignment]


def _surround(region: nn.Module, ranks: TensorRanks) -> None:
    """Puts the collectives around a region. Biases of partial products are added once, after."""
    original: Callable[..., Tensor] = region.forward
    late = [linear for linear in declared_linears(region, "inputs") if linear.bias is not None]
    for linear in late:
        linear.forward = _without_bias(linear)  # type: ignore[method-assign]

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = ranks.leave(original(ranks.enter(x), *args, **kwargs))
        for linear in late:
            assert linear.bias is not None
            out = out + linear.bias.to(out.dtype)
        return out

    region.forward = forward


def _without_bias(linear: Linear) -> Callable[..., Tensor]:
    def forward(*inputs: Tensor) -> Tensor:
        return linear.multiply(product_input(linear, inputs))

    return forward
