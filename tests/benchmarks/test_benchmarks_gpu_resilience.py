"""The dry run of the GPU benchmark of saving and of the guard."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "resilience.py"


def test_the_dry_run_finds_copies_exact_and_bad_steps_without_effect(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPT), "--dry-run", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert sum(value is True for value in found.values()) == 8
    assert "passed" in done.stdout
