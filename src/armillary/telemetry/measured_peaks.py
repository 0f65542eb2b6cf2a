"""Peaks that `armillary doctor` measured on this machine, kept beside the caches."""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Any

from filelock import FileLock

from armillary.foundation.files import write_atomically
from armillary.foundation.machine import available_cores, cache_base
from armillary.telemetry.machine.host import cpu_model


def peaks_file() -> Path:
    """Where measured peaks are kept: `peaks.json` in the base folder of the caches."""
    return cache_base() / "peaks.json"


def machine_key(number_format: str) -> str:
    """Names this CPU, its usable cores and a number format: what a measurement holds for."""
    model = cpu_model() or platform.processor() or platform.machine()
    return f"{model} | {available_cores()} cores | {number_format.removeprefix('torch.')}"


def store_measured_peak(number_format: str, flops: float, file: Path | None = None) -> None:
    """Keeps a measured rate of this machine, unless a higher one is known: a peak is a maximum."""
    file = file or peaks_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_suffix(".lock")):
        known = _read(file)
        key = machine_key(number_format)
        if flops > _flops_of(known.get(key), 0.0):
            known[key] = {"flops": flops, "measured": time.time()}
            write_atomically(file, json.dumps(known, indent=1, sort_keys=True) + "\n")


def measured_peak(number_format: str, file: Path | None = None) -> float | None:
    """FLOP/s of all cores of this machine as `armillary doctor` measured them, or None."""
    flops = _flops_of(_read(file or peaks_file()).get(machine_key(number_format)), 0.0)
    return flops if flops > 0 else None


def _flops_of(entry: object, default: float) -> float:
    flops = entry.get("flops") if isinstance(entry, dict) else None
    return float(flops) if isinstance(flops, (int, float)) else default


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
