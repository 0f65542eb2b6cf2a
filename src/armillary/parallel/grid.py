"""Where each rank stands: arithmetic on degrees, without torch and without other ranks."""

from __future__ import annotations

from dataclasses import dataclass

DATA_AXES = ("dp_replicate", "dp_shard")
"""Axes over which the rows of a batch are dealt, outermost first."""

DENSE_AXES = ("pp", *DATA_AXES, "cp", "tp")
"""Axes whose degrees multiply to the number of ranks, outermost first: tp is innermost."""

EXPERT_AXES = ("pp", "dp_replicate", "expert_fsdp", "ep", "expert_tp")
"""The same ranks arranged for experts; the last three cover dp_shard x cp x tp."""

DENSE_VIEW = ("pp", "dp_replicate", "tp", "fsdp")
"""Order in which the weights outside experts are cut: by tp first, then the pieces by fsdp."""

EXPERT_VIEW = ("pp", "dp_replicate", "ep", "expert_tp", "expert_fsdp")
"""Order in which the weights of experts are cut."""

AXES = (*DENSE_AXES, "fsdp", "expert_fsdp", "ep", "expert_tp")
"""Every axis that has groups. `fsdp` is dp_shard and cp together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """The ranks as a box with an axis for each kind of parallelism.

    Ranks that differ in one axis only are a group of that axis. The ranks of a group are evenly
    spaced, so an axis is a number of ranks and the distance between two neighbours.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    expert_tp: int = 1

    def __post_init__(self) -> None:
        inner = self.dp_shard * self.cp * self.tp
        assert min(self.axes.values()) >= 1 and inner % (self.ep * self.expert_tp) == 0, self

    @property
    def axes(self) -> dict[str, int]:
        """Degrees as they are written in a recipe."""
        names = (*DENSE_AXES, "ep", "expert_tp")
        return {name: getattr(self, name) for name in names}

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_size(self) -> int:
        """Into how many parts the rows of a batch are dealt."""
        return self.dp_replicate * self.dp_shard

    def degree(self, axis: str) -> int:
        """Ranks of a group of this axis."""
        return self._lattice(axis)[0]

    def coordinate(self, rank: int, axis: str) -> int:
        """Place of a rank within its group of this axis, from 0."""
        degree, distance = self._lattice(axis)
        return rank // distance % degree

    def members(self, rank: int, axis: str) -> tuple[int, ...]:
        """Ranks of this rank's group, in the order of their coordinates, which is ascending."""
        degree, distance = self._lattice(axis)
        first = rank - rank // distance % degree * distance
        return tuple(range(first, first + degree * distance, distance))

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """All groups of an axis; each rank is in one of them."""
        ranks = range(self.world_size)
        return [self.members(rank, axis) for rank in ranks if self.coordinate(rank, axis) == 0]

    def data_rank(self, rank: int) -> int:
        """Which part of each batch is a rank's; ranks of one cp, tp or pp group share it."""
        replica, shard = self.coordinate(rank, "dp_replicate"), self.coordinate(rank, "dp_shard")
        return replica * self.dp_shard + shard

    def _lattice(self, axis: str) -> tuple[int, int]:
        """Degree of an axis, and distance between the ranks of a group."""
        inner = self.dp_shard * self.cp * self.tp
        experts = self.ep * self.expert_tp
        return {
            "pp": (self.pp, self.dp_replicate * inner),
            "dp_replicate": (self.dp_replicate, inner),
            "dp_shard": (self.dp_shard, self.cp * self.tp),
            "cp": (self.cp, self.tp),
            "tp": (self.tp, 1),
            "fsdp": (self.dp_shard * self.cp, self.tp),
            "expert_fsdp": (inner // experts, experts),
            "ep": (self.ep, self.expert_tp),
            "expert_tp": (self.expert_tp, 1),
        }[axis]
