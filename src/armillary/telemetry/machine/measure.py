"""Short measurements: matrix products, memory bandwidth, disk. Each takes the best of its tries."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

_SQUARE_SIZES = (512, 1024, 2048)
_GPU_SIZES = (4096, 8192)
_FEWEST_TRIES = 2


def best_seconds(
    act: Callable[[], object],
    budget_seconds: float,
    synchronize: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """The fastest of repeated calls within a budget, after one call that is not counted."""
    act()
    synchronize()
    best = float("inf")
    stop = clock() + budget_seconds
    tries = 0
    while tries < _FEWEST_TRIES or clock() < stop:
        begun = clock()
        act()
        synchronize()
        best = min(best, clock() - begun)
        tries += 1
    return best


def matrix_product_flops(
    dtype: torch.dtype,
    device: torch.device,
    budget_seconds: float,
    sizes: Sequence[int] | None = None,
) -> float:
    """Best FLOP/s of square matrix products: 2 n^3 operations each."""
    chosen = sizes or (_GPU_SIZES if device.type == "cuda" else _SQUARE_SIZES)
    synchronize = _synchronizer(device)
    rates = []
    for size in chosen:
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(left)

        def product(a: torch.Tensor = left, b: torch.Tensor = right, o: torch.Tensor = out) -> None:
            torch.mm(a, b, out=o)

        seconds = best_seconds(product, budget_seconds / len(chosen), synchronize)
        rates.append(2 * size**3 / seconds)
    return max(rates)


def memory_bandwidth(
    device: torch.device, budget_seconds: float, array_bytes: int
) -> dict[str, float]:
    """Bytes a second of `copy` (a = b) and `triad` (a = b + s c), counted as STREAM counts them.

    McCalpin 1995, "Memory bandwidth and machine balance in current high performance computers":
    two arrays move in a copy, three in a triad; reads for ownership are not counted.
    """
    synchronize = _synchronizer(device)
    a, b, c = (torch.ones(array_bytes // 4, device=device) for _ in range(3))
    copy = best_seconds(lambda: a.copy_(b), budget_seconds / 2, synchronize)
    triad = best_seconds(lambda: torch.add(b, c, alpha=3.0, out=a), budget_seconds / 2, synchronize)
    return {"copy": 2 * array_bytes / copy, "triad": 3 * array_bytes / triad}


def disk_write_rate(folder: Path, size_bytes: int) -> float:
    """Bytes a second of writing a new file to stable storage in `folder`; the file is removed.

    Raises:
        OSError: the folder cannot be written.
    """
    path = folder / f".armillary-doctor-{uuid.uuid4().hex}"
    block = os.urandom(1 << 20)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        begun = time.perf_counter()
        for _ in range(max(1, size_bytes >> 20)):
            os.write(descriptor, block)
        os.fsync(descriptor)
        return max(1, size_bytes >> 20) * len(block) / (time.perf_counter() - begun)
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


def _synchronizer(device: torch.device) -> Callable[[], object]:
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    if device.type == "mps":
        return torch.mps.synchronize
    return lambda: None
