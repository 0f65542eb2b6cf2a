"""What a recipe says about scale: mesh degrees and how each axis is used.

Importing this module loads no torch, so that help is shown at once.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from armillary.foundation.errors import Problem
from armillary.parallel.activation_checkpoint_config import (
    COSTLY_OPERATORS,
    ActivationCheckpointConfig,
    EveryK,
    Full,
    NoCheckpoint,
    Selective,
)
from armillary.parallel.compile_config import Compile
from armillary.parallel.grid import DATA_AXES, DENSE_AXES, EXPERT_AXES, Grid
from armillary.parallel.schedules import stages_per_rank
from armillary.precision.config import Precision

__all__ = [
    "COSTLY_OPERATORS",
    "DATA_AXES",
    "DENSE_AXES",
    "EXPERT_AXES",
    "ActivationCheckpointConfig",
    "Compile",
    "EveryK",
    "Full",
    "NoCheckpoint",
    "Parallel",
    "Scale",
    "Selective",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """How the ranks are arranged: a product of axes, each with a degree.

    pp x dp_replicate x dp_shard x cp x tp is the number of ranks; one of the five may be -1, which
    takes the ranks that the others leave. `dp_shard` alone is FSDP, `dp_replicate` alone is DDP,
    both together are HSDP (shards inside a group, copies between). `ep` and `expert_tp` arrange
    the ranks of dp_shard x cp x tp once more, for the weights of experts only.
    """

    pp: int = 1
    """Groups of ranks between which the layers are divided, a pipeline (or -1)."""
    dp_replicate: int = 1
    """Copies of the whole model (ranks, or -1 for all that are left)."""
    dp_shard: int = -1
    """Ranks over which parameters, gradients and optimizer state are split (or -1)."""
    cp: int = 1
    """Ranks that share the tokens of one sequence; they also split what dp_shard splits (or -1)."""
    tp: int = 1
    """Ranks that share each matrix of a layer, and the tokens between its regions (or -1)."""
    ep: int = 1
    """Ranks between which the experts of a layer are divided; divides dp_shard x cp x tp."""
    expert_tp: int = 1
    """Ranks that share each matrix of an expert: 1, or as many as tp."""
    reshard_after_forward: bool = True
    """Free a block's gathered weights after its forward pass and gather them again for backward:
    less memory, more traffic. Off keeps them until the backward pass."""
    sync_every_microbatch: bool = True
    """Reduce sharded gradients after every microbatch (a shard of memory) and not only after the
    last one (whole gradients in memory, less traffic). Copies and pipelines always wait for it."""
    device: str = "auto"
    """Kind of device: auto (cuda where there is one, else cpu), cpu or cuda."""
    schedule: str = "1F1B"
    """Order of forward and backward work in a pipeline: GPipe, 1F1B, Interleaved1F1B, LoopedBFS,
    InterleavedZeroBubble, ZBVZeroBubble, DualPipeV, or the path of a .csv, a line per rank."""
    stages_per_rank: int = 0
    """Pieces of the model that a pipeline rank holds; 0: as the schedule needs, 1 or 2."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each stage, first to last; empty: cut by estimated cost."""
    context: str = "all-gather"
    """How ranks of cp see each other's keys: all-gather, ring, or ulysses (heads for tokens)."""
    context_balance: str = "head-tail"
    """Which tokens of a sequence a rank of cp holds: head-tail (one early and one late part, so
    that all have as much to attend to) or none (one part). ulysses always takes one part."""
    asynchronous_tp: bool = False
    """Overlap the traffic of tp with the matrix products it belongs to."""
    cpu_offload: bool = False
    """Keep shards, gradients and optimizer state in host memory; the optimizer runs there."""
    prefetch: int = 1
    """Blocks whose weights are gathered ahead of the one that computes; 0: as torch sees fit."""

    def resolve(self, world_size: int) -> Parallel:
        """The same arrangement with -1 replaced. Only for one without `problems`."""
        left = world_size // math.prod(d for d in self.degrees.values() if d != -1)
        degrees: dict[str, Any] = {
            axis: left if degree == -1 else degree for axis, degree in self.degrees.items()
        }
        return dataclasses.replace(self, **degrees)

    @property
    def degrees(self) -> dict[str, int]:
        """Degree of each axis that multiplies to the ranks, as it is written, outermost first."""
        return {axis: getattr(self, axis) for axis in DENSE_AXES}

    @property
    def grid(self) -> Grid:
        """Who stands where; only of an arrangement that is resolved."""
        return Grid(**self.degrees, ep=self.ep, expert_tp=self.expert_tp)

    @property
    def stages(self) -> int:
        """Pieces into which the layers are cut; 1 without a pipeline."""
        return self.pp * stages_per_rank(self) if self.pp > 1 else 1

    def problems(self, world_size: int) -> list[Problem]:
        """What keeps this arrangement from covering `world_size` ranks exactly, all at once."""
        from armillary.parallel.arrangement import arrangement_problems

        return arrangement_problems(self, world_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """The part of a recipe that is applied to a model from outside."""

    parallel: Parallel = field(default_factory=Parallel)
    """Arrangement of the ranks."""
    precision: Precision = field(default_factory=Precision)
    """Number formats."""
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=NoCheckpoint)
    """What is kept for the backward pass."""
    compile: Compile = field(default_factory=Compile)
    """Compilation."""
