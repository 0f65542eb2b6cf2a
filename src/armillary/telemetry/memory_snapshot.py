"""History of the GPU allocator. The only module that touches torch's private recorder."""

from __future__ import annotations

from pathlib import Path

import torch

_MAX_ENTRIES = 200_000


def start_memory_history() -> bool:
    """Starts recording allocations; False where there is no CUDA device."""
    if not torch.cuda.is_available():
        return False
    torch.cuda.memory._record_memory_history(max_entries=_MAX_ENTRIES)
    return True


def write_memory_snapshot(path: Path) -> None:
    """Writes what was recorded, for pytorch.org/memory_viz, and stops recording."""
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
    torch.cuda.memory._record_memory_history(enabled=None)
