"""Scale, applied from outside: a short list of passes over a plain model."""

from __future__ import annotations

from torch import nn

from armillary.parallel.activation_checkpoint import checkpoint_activations
from armillary.parallel.compile import compile_blocks
from armillary.parallel.config import Scale
from armillary.parallel.data_sharding import shard_over_data
from armillary.parallel.mesh import Mesh
from armillary.precision.compute import set_compute_dtype


def parallelize(model: nn.Module, mesh: Mesh, scale: Scale) -> None:
    """Applies the passes to a model that was built on `meta`, in place, in this order:

    1. precision: the format of the residual stream
    2. activation checkpointing: wraps what the passes before it have rewritten
    3. compilation, per block: sees the checkpointed block, not the sharding hooks
    4. data sharding: last, so that it shards what is left

    `materialise` comes next, and only then are there optimizers.
    """
    dtype = scale.precision.compute_dtype
    set_compute_dtype(model, dtype)
    checkpoint_activations(model, scale.activation_checkpoint)
    compile_blocks(model, scale.compile)
    shard_over_data(model, mesh, dtype)
