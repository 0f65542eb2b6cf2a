"""Seconds from starting the process to the end of its first optimizer step, as a user waits.

    python benchmarks/startup.py [--recipe debug] [--repeats 3] [--json FILE]

The first run, which may build the tokens, is not counted; the others find them in the cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> int:
    """Parses the command line, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="debug")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            _first_step(arguments.recipe, Path(folder, str(index)))
            for index in range(arguments.repeats + 1)
        ]
    cold, warm = runs[0], runs[1:]
    report = {"recipe": arguments.recipe, "first_run_seconds": cold, "warm_seconds": warm}
    print(
        f"{arguments.recipe}: first step after {statistics.median(warm):.2f} s"
        f" (median of {len(warm)}: {', '.join(f'{s:.2f}' for s in warm)};"
        f" the run before, which may have built the tokens: {cold:.2f})"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _first_step(recipe: str, run: Path) -> float:
    """From before the process starts to the time that its first `step` event carries."""
    began = time.time()
    command = [sys.executable, "-m", "armillary", "train", recipe, "--run", str(run)]
    subprocess.run([*command, "--budget.steps", "1"], check=True, capture_output=True)
    for line in (run / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "step":
            return float(event["time"]) - began
    raise SystemExit(f"{run}: no step was recorded")


if __name__ == "__main__":
    raise SystemExit(main())
