"""The benchmark of imports still measures, at a size that takes little time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "import_memory.py"


@pytest.mark.full
def test_four_ranks_read_a_quarter_each_of_a_small_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--gigabytes", "0.25", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| 0.25") == 4
    assert list(tmp_path.iterdir()) == []
