"""Whether all hosts see one folder, and how fast they write to it together."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from armillary.telemetry.format import byte_count, count_of
from armillary.telemetry.machine.finding import Finding, finding
from armillary.telemetry.machine.measure import disk_write_rate

_PATIENCE_SECONDS = 10.0
_POLL_SECONDS = 0.05
_SLOW_DISK = 20e6
_PROBE = ".armillary-doctor-seen-"


def leave_probe(folder: Path, name: str) -> Path:
    """Puts a file there for the others to see; rank 0's part."""
    probe = folder / f"{_PROBE}{name}"
    probe.write_text(name, encoding="ascii")
    return probe


def sees_probe(folder: Path, name: str) -> float | None:
    """Seconds until the file is here as well; None: it never came."""
    begun = time.monotonic()
    while (waited := time.monotonic() - begun) < _PATIENCE_SECONDS:
        # Network file systems remember what was not there; a listing asks again.
        with contextlib.suppress(OSError):
            if f"{_PROBE}{name}" in (each.name for each in folder.iterdir()):
                return waited
        time.sleep(_POLL_SECONDS)
    return None


def shared_finding(folder: Path, seen: Mapping[int, float | None], hosts: Sequence[str]) -> Finding:
    """Whether each of these ranks, one on each host, saw what rank 0 wrote."""
    blind = [hosts[rank] for rank, seconds in seen.items() if seconds is None]
    if blind:
        return finding(
            "run folder",
            f"{folder} of {hosts[0]} is not that of {', '.join(blind)}",
            "--run DIR on storage that all machines share",
            verdict="fail",
            blind_hosts=blind,
        )
    slowest = max((seconds or 0.0 for seconds in seen.values()), default=0.0)
    text = f"{folder} is the same on {count_of(len(seen), 'host')}, seen after {slowest:.1f} s"
    return finding("run folder", text, seconds=slowest)


def write_rate(folder: Path, size: int) -> float | str:
    """Bytes a second of this host, or why it cannot write there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return disk_write_rate(folder, size)
    except OSError as error:
        return error.strerror or str(error)


def disk_finding(folder: Path, rates: Mapping[int, float | str], hosts: Sequence[str]) -> Finding:
    """How fast hosts write when all do at once."""
    refused = {hosts[rank]: why for rank, why in rates.items() if isinstance(why, str)}
    if refused:
        text = "; ".join(f"{host} cannot write to {folder}: {why}" for host, why in refused.items())
        advice = "mount it for writing, or --run DIR elsewhere"
        return finding("disk", text, advice, verdict="fail", refused=refused)
    numbers = {rank: rate for rank, rate in rates.items() if isinstance(rate, float)}
    slowest = min(numbers, key=lambda rank: numbers[rank])
    advice = ""
    if numbers[slowest] < _SLOW_DISK:
        advice = f"slow on {hosts[slowest]}: checkpoints will take long; --run DIR elsewhere"
    text = (
        f"{count_of(len(numbers), 'host')} at once write {byte_count(sum(numbers.values()))}/s,"
        f" the slowest {byte_count(numbers[slowest])}/s ({hosts[slowest]})"
    )
    values = {hosts[rank]: rate for rank, rate in numbers.items()}
    return finding("disk", text, advice, write_bytes_per_second=values)
