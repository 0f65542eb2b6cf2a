"""What this machine can do: memory, bandwidth, matrix products, disks."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from armillary.foundation.machine import available_cores
from armillary.telemetry.format import byte_count, flop_rate
from armillary.telemetry.machine.finding import Finding, finding
from armillary.telemetry.machine.host import memory_bytes
from armillary.telemetry.machine.measure import (
    disk_write_rate,
    matrix_product_flops,
    memory_bandwidth,
)
from armillary.telemetry.measured_peaks import peaks_file, store_measured_peak
from armillary.telemetry.peaks import peak_flops

GIB = 2**30
_LITTLE_MEMORY = 2 * GIB
_LITTLE_DISK = 5 * GIB
_NO_DISK = 64 * 2**20
_SLOW_DISK = 20e6
_ARRAY_BYTES = 128 * 2**20
_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def compute_device() -> torch.device:
    """What training would use."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def memory_finding() -> Finding:
    """Memory of the host."""
    sizes = memory_bytes()
    if sizes is None:
        return finding("memory", "size unknown on this system")
    total, free = sizes
    advice = ""
    if free < _LITTLE_MEMORY:
        advice = "less than 2 GiB is free: end other programs or choose a smaller model"
    text = f"{byte_count(total)}, {byte_count(free)} free"
    return finding("memory", text, advice, total_bytes=total, free_bytes=free)


def disk_finding(name: str, folder: Path, remedy: str, *, quick: bool) -> Finding:
    """Space and write rate where `folder` is, or will be.

    Args:
        name: Of the finding.
        folder: May not exist yet; then the nearest folder above it is looked at.
        remedy: What to do when it cannot be written or is full.
        quick: Writes less.
    """
    there = folder.expanduser().absolute()
    while not there.is_dir() and there != there.parent:
        there = there.parent
    try:
        free = shutil.disk_usage(there).free
        if free < _NO_DISK:
            return finding(name, f"{there}: full", remedy, verdict="fail", free_bytes=free)
        rate = disk_write_rate(there, (8 if quick else 48) << 20)
    except OSError as error:
        return finding(name, f"{there}: cannot write: {error.strerror}", remedy, verdict="fail")
    advice = ""
    if free < _LITTLE_DISK:
        advice = f"little space: {remedy}"
    elif rate < _SLOW_DISK:
        advice = f"slow: checkpoints and tokens will take long; {remedy}"
    text = f"{there}: {byte_count(free)} free, writes {byte_count(rate)}/s"
    return finding(
        name, text, advice, folder=str(there), free_bytes=free, write_bytes_per_second=rate
    )


def bandwidth_finding(*, quick: bool) -> Finding:
    """How fast the device's memory moves arrays that no cache holds."""
    sizes = memory_bytes()
    array = _ARRAY_BYTES
    if sizes is not None and sizes[1] < 8 * _ARRAY_BYTES:
        array = 16 * 2**20
    rates = memory_bandwidth(compute_device(), 0.1 if quick else 0.5, array)
    text = f"copy {rates['copy'] / 1e9:.1f} GB/s, triad {rates['triad'] / 1e9:.1f} GB/s"
    return finding(
        "bandwidth",
        text,
        copy_bytes_per_second=rates["copy"],
        triad_bytes_per_second=rates["triad"],
    )


def matrix_finding(*, quick: bool) -> Finding:
    """Rates of matrix products; on a CPU the peaks for MFU are stored from here."""
    device = compute_device()
    budget = 0.15 if quick else 0.7
    threads = torch.get_num_threads()
    torch.set_num_threads(available_cores())  # the peak is the whole machine's
    try:
        rates = {
            name: matrix_product_flops(dtype, device, budget) for name, dtype in _FORMATS.items()
        }
    finally:
        torch.set_num_threads(threads)
    text = ", ".join(f"{name} {flop_rate(rate)}" for name, rate in rates.items())
    advice = ""
    if device.type == "cpu":
        for name, dtype in _FORMATS.items():
            store_measured_peak(str(dtype), rates[name])
        text += f" (kept for MFU in {peaks_file()})"
    else:
        peak = peak_flops(torch.cuda.get_device_name(device), "bfloat16")
        if peak is not None and rates["bf16"] < 0.5 * peak:
            advice = (
                f"bf16 is {rates['bf16'] / peak:.0%} of the peak: is the GPU busy or throttled?"
            )
    if rates["bf16"] < rates["fp32"]:
        advice = "bf16 is slower than fp32 here: --precision.compute float32"
    return finding("products", text, advice, fp32_flops=rates["fp32"], bf16_flops=rates["bf16"])
