"""Replica groups: separate runs that share every step, and of which each may come and go.

Only configuration is exported here and importing it loads no torch; what acts is imported from its
module.
"""

from armillary.parallel.replicas.config import (
    DiLoCo,
    EveryStep,
    LocalSGD,
    Replicas,
    Synchronisation,
)

__all__ = ["DiLoCo", "EveryStep", "LocalSGD", "Replicas", "Synchronisation"]
