"""How one model is spread over many devices: a mesh, and passes over plain modules.

Only configuration is exported here and importing it loads no torch; what acts is imported from its
module: `parallel.process`, `parallel.mesh`, `parallel.parallelize`, `parallel.materialise`.
"""

from armillary.parallel.config import (
    ActivationCheckpointConfig,
    Compile,
    EveryK,
    Full,
    NoCheckpoint,
    Parallel,
    Scale,
    Selective,
)

__all__ = [
    "ActivationCheckpointConfig",
    "Compile",
    "EveryK",
    "Full",
    "NoCheckpoint",
    "Parallel",
    "Scale",
    "Selective",
]
