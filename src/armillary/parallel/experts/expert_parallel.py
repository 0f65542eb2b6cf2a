"""The pass that deals the experts of a mixture to ranks."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from armillary.models.layers.experts import Experts
from armillary.models.layers.moe import MoE
from armillary.parallel.collectives import group_name
from armillary.parallel.experts.dispatch import ExchangedDispatch, GatheredDispatch
from armillary.parallel.layout import Layouts, split_parameter
from armillary.parallel.mesh import Mesh

_ROW_AXES = ("cp", "tp")
"""Axes whose ranks hold different tokens of the same rows."""


def split_experts(model: nn.Module, mesh: Mesh, layouts: Layouts) -> None:
    """Gives each rank its experts of every mixture, and replaces how tokens get to them. In place.

    Experts are dealt in contiguous parts over `ep`, and each of them cut along F over `expert_tp`.
    They are arranged in the expert view of the mesh on every mesh, since data sharding has fewer
    ranks for them than for other weights. The router and shared experts are not touched: they are
    dense. Before the pass that splits tensors; without a process group only the weights are cut.
    """
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            _cut(module.experts, f"{name}.experts", mesh, layouts)
            _connect(module, mesh)


def _cut(experts: Experts, name: str, mesh: Mesh, layouts: Layouts) -> None:
    tp = mesh.degree("expert_tp")
    for attribute, parameter in list(experts.named_parameters(recurse=False)):
        own = f"{name}.{attribute}"
        dim = experts.expert_split.get(attribute)
        assert parameter.shape[0] % mesh.degree("ep") == 0, f"{own}: refused before the model"
        assert dim is None or parameter.shape[dim] % tp == 0, f"{own}: refused before the model"
        layouts.view_as_expert(own)
        split_parameter(experts, attribute, own, layouts, mesh, axis="ep", dim=0)
        if dim is not None:
            split_parameter(experts, attribute, own, layouts, mesh, axis="expert_tp", dim=dim)
        elif tp > 1:
            # Added once by all ranks together, each to its own partial sum.
            layouts.mark_partial(own, "expert_tp")
    experts.output_bias_share /= tp


def _connect(moe: MoE, mesh: Mesh) -> None:
    if group := group_name(mesh.group("ep")):
        moe.dispatch = ExchangedDispatch(group)
    if group := group_name(mesh.group("expert_tp")):
        moe.dispatch = GatheredDispatch(group, moe.dispatch)
    if any(mesh.degree(axis) > 1 for axis in _ROW_AXES):
        moe.sequence_sum = _sum_over_rows(mesh)


def _sum_over_rows(mesh: Mesh) -> Callable[[Tensor], Tensor]:
    def total(counts: Tensor) -> Tensor:
        return mesh.sum_over(counts, _ROW_AXES)

    return total
