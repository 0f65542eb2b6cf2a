"""Peak memory of a rank."""

from __future__ import annotations

import torch

from armillary.telemetry.machine.host import peak_resident_bytes


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this rank has held so far: tensors on a GPU, resident memory on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return peak_resident_bytes()
