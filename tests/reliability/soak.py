"""A long run of the debug model holds its memory and its open files.

    python tests/reliability/soak.py [--steps 2000]

Saves every 5 steps; resident memory and open descriptors are read from /proc at each step that the
log tells of. The mean of the last quarter is compared with that of the first, the start left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from reliability.zygote import Process, Zygote
from tiny_runs import events_of

SAVE_EVERY = 5
START_SHARE = 0.02
"""Of the steps, at the beginning: buffers are made, files are opened."""
MOST_GROWTH = 0.03


@dataclass(frozen=True)
class Sample:
    """What a process held at a moment."""

    step: int
    resident: int
    """Bytes."""
    files: int
    """Open descriptors."""


def watch(process: Process, run: Path) -> list[Sample]:
    """Samples until the process ends, several a second."""
    samples: list[Sample] = []
    proc = Path("/proc", str(process.pid))
    log = None
    step = 0
    while process.poll() is None:
        if log is None and (run / "events.jsonl").exists():
            log = (run / "events.jsonl").open("rb")
        if log is not None:
            step += log.read().count(b'"kind":"step"')
        try:
            pages = int((proc / "statm").read_text().split()[1])
            files = len(list((proc / "fd").iterdir()))
        except OSError:  # it has just ended
            break
        samples.append(Sample(step, pages * 4096, files))
        time.sleep(0.1)
    if log is not None:
        log.close()
    return samples


def trials(steps: int = 2000) -> tuple[list[str], list[str]]:
    """One run; the table, and what was wrong."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, Zygote() as zygote:
        run = Path(folder, "run")
        argv = ["train", "debug", "--run", str(run), "--budget.steps", str(steps)]
        argv += ["--checkpoint.every", str(SAVE_EVERY), "--validation.every", "100"]
        process = zygote.start(argv, cwd=folder, output=Path(folder, "out"))
        samples = watch(process, run)
        if process.wait() != 0:
            return [], [f"the run failed: {process.output()[-1000:]}"]
        saves = [e for e in events_of(run, "checkpoint") if e["state"] == "durable"]
        taken = len(events_of(run, "step"))
    first, last = (_between(samples, steps, *part) for part in ((START_SHARE, 0.25), (0.75, 1.0)))
    wrong = []
    lines = ["| held | first quarter | last quarter | growth |", "|---|---|---|---|"]
    for name, unit, scale in (("resident", "MB", 1e6), ("files", "", 1)):
        means = (statistics.mean(getattr(s, name) / scale for s in part) for part in (first, last))
        before, after = means
        growth = after / before - 1
        lines.append(f"| {name} | {before:,.1f} {unit} | {after:,.1f} {unit} | {growth:+.2%} |")
        if growth > MOST_GROWTH:
            wrong.append(f"{name} grew by {growth:.1%}")
    if taken != steps or len(saves) < steps // SAVE_EVERY:
        wrong.append(f"{taken} steps and {len(saves)} durable saves instead of {steps} and more")
    lines += ["", f"{taken:,} steps, {len(saves)} durable saves, {len(samples):,} samples."]
    return lines, wrong


def _between(samples: list[Sample], steps: int, low: float, high: float) -> list[Sample]:
    return [s for s in samples if low * steps < s.step <= high * steps]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    lines, wrong = trials(parser.parse_args().steps)
    print(*lines, *wrong, sep="\n")
    sys.exit(1 if wrong else 0)
