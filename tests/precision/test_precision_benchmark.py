"""The dry run of the GPU benchmark of training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "pretraining.py"


def test_the_dry_run_of_the_gpu_benchmark_passes(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    command = [sys.executable, str(SCRIPT), "--dry-run", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    table = json.loads(file.read_text())
    assert table["product_error"] < 1e-2
    found = {(row["model"], row["format"]): row for row in table["results"]}
    assert len(found) == 3
    for (_, number_format), row in found.items():
        assert row["last_loss"] < row["first_loss"]
        assert row["converted"] == (0 if number_format == "bfloat16" else 14)
    assert "passed in" in done.stdout
