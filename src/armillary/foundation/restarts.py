"""How often a run was started again by whoever watches over it. Loads no torch."""

from __future__ import annotations

import os

RESTART_VARIABLE = "ARMILLARY_RESTART"
"""Through which `train --max-restarts` tells the ranks."""

_TORCHRUN_VARIABLE = "TORCHELASTIC_RESTART_COUNT"


def restart_number() -> int:
    """0 the first time. Under torchrun, how often this host's agent saw ranks fail."""
    number = os.environ.get(RESTART_VARIABLE) or os.environ.get(_TORCHRUN_VARIABLE) or "0"
    return int(number) if number.isdigit() else 0
