"""Who holds what: names, shapes and bytes of every rank, worked out in one process.

The real passes cut a model on `meta` for one pipeline rank; where the other ranks of the same
stages stand is arithmetic on the layouts that the passes record. No process group, no memory.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from armillary.foundation.patterns import matches
from armillary.models.config import ModelConfig
from armillary.models.decoder import Decoder
from armillary.models.tuning.config import Full, TuningConfig
from armillary.optim.config import OptimizerConfig
from armillary.optim.muon import Muon, is_matrix
from armillary.parallel.config import Parallel
from armillary.parallel.data_sharding import DATA_AXIS, data_dim
from armillary.parallel.experts.expert_parallel import split_experts
from armillary.parallel.grid import AXES, Grid
from armillary.parallel.layout import Layout, Layouts, RankPlace, local_shape
from armillary.parallel.mesh import Mesh
from armillary.parallel.pipeline.placement import rank_of_stages
from armillary.parallel.pipeline.split import layer_costs, plan_of, split_pipeline
from armillary.parallel.tensor.tensor_parallel import split_tensors

BYTES_PER_ELEMENT = 4
"""Masters, gradients and moments are float32."""

KINDS = ("parameters", "gradients", "optimizer")
"""What is counted in bytes; activations are not."""


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter as one rank holds it."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    local_shape: tuple[int, ...]
    """Of what is here; a dim of 0: nothing."""
    moments: int
    """Tensors of its shape that the optimizer keeps."""
    is_trained: bool = True
    """Whether it has a gradient."""

    @property
    def elements(self) -> int:
        """How many numbers of it are here."""
        return math.prod(self.local_shape)


@dataclass(frozen=True, slots=True)
class RankAccount:
    """One rank: where it stands, and what it holds between two steps."""

    rank: int
    coordinates: dict[str, int]
    """Its place on each axis."""
    groups: dict[str, tuple[int, ...]]
    """Ranks of its group on each axis of more than one rank."""
    before: tuple[int, ...]
    """Ranks that send it activations, one for each of its stages but the first of all."""
    after: tuple[int, ...]
    """Ranks that it sends activations to, one for each of its stages but the last of all."""
    stages: dict[int, tuple[str, ...]]
    """Its stages of the pipeline, and the names of their layers."""
    parameters: tuple[Held, ...]

    @property
    def elements(self) -> int:
        """Numbers in all parameters here."""
        return sum(held.elements for held in self.parameters)

    @property
    def bytes(self) -> dict[str, int]:
        """By kind, see `KINDS`."""
        moments = sum(held.moments * held.elements for held in self.parameters)
        trained = sum(held.elements for held in self.parameters if held.is_trained)
        return {
            "parameters": self.elements * BYTES_PER_ELEMENT,
            "gradients": trained * BYTES_PER_ELEMENT,
            "optimizer": moments * BYTES_PER_ELEMENT,
        }


@dataclass(frozen=True, slots=True)
class Role:
    """Ranks of one pipeline place that hold as much of each kind."""

    ranks: tuple[int, ...]
    example: RankAccount
    """The first of them."""


@dataclass(frozen=True, slots=True)
class _Stages:
    """What the ranks of one pipeline place hold together."""

    layers: dict[int, tuple[str, ...]]
    parameters: tuple[tuple[str, Layout], ...]
    frozen: frozenset[str]
    """Names of what is not trained."""


@dataclass(frozen=True, slots=True)
class StageShare:
    """A stage of the pipeline, and its share of the model's work."""

    index: int
    rank: int
    """The pipeline rank that computes it."""
    layers: tuple[str, ...]
    cost: float
    """Estimated share of all multiplications, in [0, 1]; the head is the last stage's."""


class Account:
    """The books of all ranks. Stages are cut when they are first asked for."""

    def __init__(
        self,
        model: ModelConfig,
        parallel: Parallel,
        optimizer: OptimizerConfig,
        world_size: int,
        tuning: TuningConfig | None = None,
    ) -> None:
        """Of an arrangement without problems on `world_size` ranks; without a tuning all weights
        are trained."""
        self.parallel = parallel.resolve(world_size)
        self.grid: Grid = self.parallel.grid
        self.stage_ranks = rank_of_stages(self.parallel)
        """The pipeline rank of each stage, first to last."""
        self._model, self._optimizer, self._tuning = model, optimizer, tuning or Full()
        self._stages = functools.cache(self._cut)

    def rank(self, rank: int) -> RankAccount:
        """What a rank holds."""
        grid = self.grid
        stages = self._stages(grid.coordinate(rank, "pp"))
        place = RankPlace(grid, rank)
        before, after = self._neighbours(rank)
        return RankAccount(
            rank=rank,
            coordinates={axis: grid.coordinate(rank, axis) for axis in AXES},
            groups={axis: grid.members(rank, axis) for axis in AXES if grid.degree(axis) > 1},
            before=before,
            after=after,
            stages=stages.layers,
            parameters=tuple(
                self._held(name, layout, place, is_trained=name not in stages.frozen)
                for name, layout in stages.parameters
            ),
        )

    def roles(self) -> list[Role]:
        """All ranks, by what they hold."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.grid.world_size):
            found.setdefault(self._signature(rank), []).append(rank)
        return [Role(tuple(ranks), self.rank(ranks[0])) for ranks in found.values()]

    def stages(self) -> list[StageShare]:
        """The pipeline, first stage to last, with what each is estimated to cost."""
        model = self._whole()
        ranks, names = self.stage_ranks, list(model.layers)
        costs = layer_costs(model)
        plan = plan_of(model, len(ranks), self.parallel.stage_layers)
        own = [sum(costs[index] for index in layers) for layers in plan]
        own[-1] += math.prod(model.head.weight.shape)
        return [
            StageShare(index, ranks[index], tuple(names[each] for each in layers), cost / sum(own))
            for index, (layers, cost) in enumerate(zip(plan, own, strict=True))
        ]

    def _signature(self, rank: int) -> tuple[int, ...]:
        """Equal for ranks with as many elements of each parameter."""
        pp = self.grid.coordinate(rank, "pp")
        place = RankPlace(self.grid, rank)
        parameters = self._stages(pp).parameters
        return (pp, *(math.prod(local_shape(layout, place)) for _, layout in parameters))

    def _cut(self, pp: int) -> _Stages:
        """Runs the passes as the first rank of a pipeline place would."""
        world_size = self.grid.world_size
        mesh = Mesh.imagined(self.parallel, world_size, pp * (world_size // self.grid.pp))
        model = self._whole()
        frozen = frozenset(name for name, p in model.named_parameters() if not p.requires_grad)
        layouts = Layouts.of(model)
        parts = split_pipeline(model, mesh, layouts)
        for part in parts:
            split_experts(part, mesh, layouts)
            split_tensors(part, mesh, layouts)
        place = RankPlace(self.grid, mesh.rank)
        indices = [index for index, rank in enumerate(self.stage_ranks) if rank == pp]
        return _Stages(
            {index: tuple(_layers(part)) for index, part in zip(indices, parts, strict=True)},
            tuple(
                (name, _shard(layouts[name], place))
                for part in parts
                for name in dict.fromkeys(layouts.canonical(n) for n, _ in part.named_parameters())
            ),
            frozen,
        )

    def _whole(self) -> Decoder:
        """The model, on `meta`."""
        with torch.device("meta"):
            model = self._model.build()
        self._tuning.apply(model)
        return model

    def _held(self, name: str, layout: Layout, place: RankPlace, *, is_trained: bool) -> Held:
        return Held(
            name,
            layout.shape,
            local_shape(layout, place),
            self._moments(name, layout) if is_trained else 0,
            is_trained,
        )

    def _neighbours(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        members, here = self.grid.members(rank, "pp"), self.grid.coordinate(rank, "pp")
        order = self.stage_ranks
        pairs = [(left, right) for left, right in itertools.pairwise(order) if left != right]
        before = tuple(members[left] for left, right in pairs if right == here)
        after = tuple(members[right] for left, right in pairs if left == here)
        return before, after

    def _moments(self, name: str, layout: Layout) -> int:
        """AdamW keeps two, Muon one of the matrices that it updates."""
        config = self._optimizer
        by_muon = isinstance(config, Muon) and matches(name, config.matrices)
        return 1 if by_muon and is_matrix(name, layout.shape) else 2


def _layers(part: nn.Module) -> Iterator[str]:
    layers = part.get_submodule("layers")
    return (name for name, _ in layers.named_children())


def _shard(layout: Layout, place: RankPlace) -> Layout:
    """The layout with the cut that `shard_over_data` makes last."""
    axis = DATA_AXIS[layout.view]
    local = local_shape(layout, place)
    return layout.split(axis, data_dim(local, layout.view, place.degree(axis)))
