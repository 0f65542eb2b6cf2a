"""Facts about this host that need no torch: CPU, memory."""

from __future__ import annotations

import platform
import resource
import sys
from pathlib import Path


def cpu_model() -> str:
    """The CPU's name and, because virtual machines shorten names, its family and model numbers."""
    fields = _colon_file(Path("/proc/cpuinfo"))
    if "model name" not in fields:
        return platform.processor()
    numbers = "/".join(
        fields[name] for name in ("cpu family", "model", "stepping") if name in fields
    )
    return f"{fields['model name']} ({numbers})" if numbers else fields["model name"]


def cpu_flags() -> frozenset[str]:
    """Instruction set extensions as Linux names them; empty elsewhere."""
    fields = _colon_file(Path("/proc/cpuinfo"))
    return frozenset((fields.get("flags") or fields.get("Features") or "").split())


def memory_bytes() -> tuple[int, int] | None:
    """Memory of this machine, (total, available), within the limit of its container if any."""
    fields = _colon_file(Path("/proc/meminfo"))
    if "MemTotal" not in fields or "MemAvailable" not in fields:
        return None
    total, available = (
        int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable")
    )
    limit, used = _control_group("memory.max"), _control_group("memory.current")
    if limit is not None and limit < total:
        total, available = limit, min(available, max(0, limit - (used or 0)))
    return total, available


def peak_resident_bytes() -> int:
    """Most memory that this process has held so far."""
    fields = _colon_file(Path("/proc/self/status"))
    if "VmHWM" in fields:
        return int(fields["VmHWM"].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _control_group(name: str) -> int | None:
    try:
        text = (Path("/sys/fs/cgroup") / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _colon_file(path: Path) -> dict[str, str]:
    """First value of each `name: value` line; empty where there is no such file."""
    fields: dict[str, str] = {}
    try:
        text = path.read_text()
    except OSError:
        return fields
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields
