"""The pass that divides the layers between the ranks of a pipeline."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from armillary.foundation.errors import Problem, UserError
from armillary.models.decoder import Decoder
from armillary.models.layers.router import Router
from armillary.parallel.blocks import blocks_of
from armillary.parallel.layout import Layouts
from armillary.parallel.mesh import Mesh
from armillary.parallel.pipeline.placement import rank_of_stages
from armillary.parallel.pipeline.stage import Stage, set_stage

_Kind = TypeVar("_Kind", bound=nn.Module)

_ROW = 8_192
"""Tokens of the row for which attention is priced, unless the model is meant for shorter ones."""


def split_pipeline(model: nn.Module, mesh: Mesh, layouts: Layouts) -> list[nn.Module]:
    """The stages of this rank, first to last, each with the names of the whole model.

    Second in order, after the format of the residual stream is set: what follows sees a decoder
    with fewer layers and, except in the first and the last stage, no embedding, norm and head. A
    stage is a shallow copy; the whole model must not be used any more. A head that is tied to the
    embedding gets a weight of its own, a further copy of the one tied parameter (see `tied`).

    Args:
        model: a decoder on `meta`.
        mesh: where; needs no process group.
        layouts: unchanged, whole parameters keep their names.

    Raises:
        UserError: there are more stages than layers, or `parallel.stage_layers` has other layers.
    """
    if mesh.degree("pp") == 1:
        return [model]
    assert isinstance(model, Decoder), f"{type(model).__name__} is no decoder"
    weight = model.embedding.weight
    ranks = rank_of_stages(mesh.parallel)
    layers = plan_of(model, len(ranks), mesh.parallel.stage_layers)
    here = mesh.coordinate("pp")
    return [
        _stage(
            model,
            layers[index],
            Stage(
                index=index,
                ranks=ranks,
                width=weight.shape[1],
                dtype=model.embedding.output_dtype or weight.dtype,
                tied=model.head.weight is weight,
            ),
        )
        for index, rank in enumerate(ranks)
        if rank == here
    ]


def plan_of(model: Decoder, stages: int, override: Sequence[int] = ()) -> list[range]:
    """The layers of each stage of a model that no pass has cut yet.

    Raises:
        UserError: there are more stages than layers, or the override has other layers.
    """
    costs = layer_costs(model)
    if override and sum(override) != len(costs):
        raise UserError(
            Problem(
                f"parallel.stage_layers has {sum(override)} layers, and the model {len(costs)}",
                allowed="numbers of layers whose sum is model.n_layers",
                fix="--parallel.stage-layers ''",
            )
        )
    if stages > len(costs):
        raise UserError(
            Problem(
                f"{stages} stages of a pipeline are more than {len(costs)} layers",
                allowed=f"parallel.pp times parallel.stages_per_rank up to {len(costs)}",
                fix="--parallel.pp 1",
            )
        )
    return stage_plan(costs, stages, override, last=float(math.prod(model.head.weight.shape)))


def layer_costs(model: Decoder) -> list[float]:
    """Multiplications of each layer for one token, forward: an estimate that counts its matrices,
    of experts those that a token is sent to, and the scores of attention."""
    row = min(model.max_seq_len, _ROW)
    return [_layer_cost(block, row) for block in blocks_of(model)]


def stage_plan(
    costs: Sequence[float],
    n_stages: int,
    override: Sequence[int] = (),
    *,
    first: float = 0.0,
    last: float = 0.0,
) -> list[range]:
    """Which layers each stage takes: contiguous, at least one, so that the costliest stage is as
    cheap as can be, and of such cuts the most even one.

    Args:
        costs: of each layer.
        n_stages: how many; at most as many as layers.
        override: layers of each stage, instead.
        first: what the first stage bears besides its layers.
        last: what the last stage bears, the head.
    """
    sizes = list(override) or _sizes(costs, n_stages, first, last)
    assert len(sizes) == n_stages and sum(sizes) == len(costs), (sizes, n_stages, len(costs))
    ends = [sum(sizes[: index + 1]) for index in range(n_stages)]
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _sizes(costs: Sequence[float], n_stages: int, first: float, last: float) -> list[int]:
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def load(stage: int, begin: int, end: int) -> float:
        own = (first if stage == 0 else 0.0) + (last if stage == n_stages - 1 else 0.0)
        return own + sums[end] - sums[begin]

    largest, _ = _best_cut(len(costs), n_stages, load, max)
    limit = largest * (1 + 1e-9)  # sums in another order round differently

    def unevenness(stage: int, begin: int, end: int) -> float:
        cost = load(stage, begin, end)
        return math.inf if cost > limit else cost * cost

    _, ends = _best_cut(len(costs), n_stages, unevenness, lambda total, own: total + own)
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def _best_cut(
    n_layers: int,
    n_stages: int,
    cost: Callable[[int, int, int], float],
    combine: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """The least combined cost of all cuts, and where its stages end; dynamic programming."""
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(n_stages):
        left = n_stages - 1 - stage  # later stages need a layer each
        only_end = range(n_layers, n_layers + 1)
        ends = only_end if left == 0 else range(stage + 1, n_layers - left + 1)
        best.append(
            {
                end: min(
                    (combine(total, cost(stage, begin, end)), begin)
                    for begin, (total, _) in best[-1].items()
                    if begin < end
                )
                for end in ends
            }
        )
    ends_found, end = [], n_layers
    for stage in range(n_stages, 0, -1):
        ends_found.append(end)
        end = best[stage][end][1]
    return best[n_stages][n_layers][0], ends_found[::-1]


def _layer_cost(block: nn.Module, row: int) -> float:
    cost = 0.0
    routers = (module for module in block.modules() if isinstance(module, Router))
    active = next((router.n_active / router.n_experts for router in routers), 1.0)
    for module in block.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.dim() == 2:
                cost += parameter.numel()
            elif parameter.dim() == 3:  # [E, ...]: a token meets k of the E experts
                cost += parameter.numel() * active
    attention: Any = getattr(block, "attention", None)
    output = getattr(attention, "output", None)
    if isinstance(output, nn.Module) and isinstance(output.weight, torch.Tensor):
        window = getattr(block, "window", None)
        seen = row / 2 if window is None or window >= row else window * (1 - window / (2 * row))
        cost += 2 * output.weight.shape[1] * seen  # scores, and their products with values
    return cost


def _stage(model: Decoder, layers: range, stage: Stage) -> nn.Module:
    part = _shallow_copy(model)
    names = list(model.layers)
    part.layers = nn.ModuleDict({names[index]: model.layers[names[index]] for index in layers})
    if not stage.is_last:
        part._modules["norm"] = part._modules["head"] = None
    if not stage.is_first:
        part._modules["embedding"] = None
        if stage.is_last and stage.tied:
            part.head = _shallow_copy(model.head)
            weight = model.head.weight
            part.head.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    set_stage(part, stage)
    return part


def _shallow_copy(module: _Kind) -> _Kind:
    """A module with the same children and parameters, which can be exchanged on it alone."""
    copied = copy.copy(module)
    for name, value in list(vars(copied).items()):
        if name.startswith("_") and isinstance(value, dict):
            vars(copied)[name] = value.copy()
    return copied
