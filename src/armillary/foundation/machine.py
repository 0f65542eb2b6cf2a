"""What this machine gives a process, and where it may keep things. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "ARMILLARY_CACHE"
"""Environment variable that names the base folder of everything that can be made again."""


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cache_base() -> Path:
    """The folder that $ARMILLARY_CACHE names, or ~/.cache/armillary."""
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/armillary").expanduser().absolute()
