"""All that `armillary doctor` looks at, in the order it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from armillary.foundation.progress import Progress
from armillary.telemetry.machine import hardware, software
from armillary.telemetry.machine.finding import Finding, finding
from armillary.telemetry.measured_peaks import peaks_file


def examine(*, quick: bool, progress: Progress) -> Iterator[Finding]:
    """Looks at one thing after another. A look that breaks is a finding too."""
    cache = peaks_file().parent
    looks: list[Callable[[], Finding | list[Finding]]] = [
        software.torch_finding,
        software.cpu_finding,
        software.device_findings,
        software.distributed_finding,
        software.compiler_finding,
        software.extras_finding,
        hardware.memory_finding,
        lambda: hardware.disk_finding(
            "cache", cache, "set ARMILLARY_CACHE to a folder on another disk", quick=quick
        ),
        lambda: hardware.disk_finding(
            "here", Path.cwd(), "train with --run FOLDER on another disk", quick=quick
        ),
        lambda: hardware.bandwidth_finding(quick=quick),
        lambda: hardware.matrix_finding(quick=quick),
    ]
    with progress.task("examining this machine", total=len(looks)) as advance:
        for look in looks:
            found = _without_breaking(look)
            yield from found if isinstance(found, list) else [found]
            advance(1)


def _without_breaking(look: Callable[[], Finding | list[Finding]]) -> Finding | list[Finding]:
    try:
        return look()
    except Exception as error:
        name = getattr(look, "__name__", "check").removesuffix("_finding")
        return finding(name, f"could not be examined: {error!r}", "report this line")
