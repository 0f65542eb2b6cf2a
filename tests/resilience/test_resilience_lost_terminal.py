"""A run whose terminal is lost: what ssh leaves behind when its connection breaks."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from armillary.foundation.run_folder import CHECKPOINTS_FOLDER, EVENTS_FILE

LIMIT = 120.0
UNDER_A_TERMINAL = ("env", "--default-signal=HUP", "setsid", "--ctty")
TRAIN = (sys.executable, "-m", "armillary", "train", "debug", "--budget.steps", "100000")
ASIDE = ("--parallel.device", "cpu", "--telemetry.log-every", "100")


@pytest.mark.skipif(sys.platform != "linux", reason="setsid --ctty is of Linux")
@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_run_that_loses_its_terminal_ends_with_its_state_saved(
    nproc: int, tmp_path: Path
) -> None:
    ours, theirs = os.openpty()
    run = tmp_path / "run"
    events = run / EVENTS_FILE
    with subprocess.Popen(
        [*UNDER_A_TERMINAL, *TRAIN, *ASIDE, "--nproc", str(nproc), "--run", str(run)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=tmp_path,
    ) as process:
        os.close(theirs)
        os.set_blocking(ours, False)
        limit = time.monotonic() + LIMIT
        while not (events.exists() and '"kind":"step"' in events.read_text()):
            assert process.poll() is None and time.monotonic() < limit
            with contextlib.suppress(BlockingIOError):
                os.read(ours, 2**16)  # what is shown
            time.sleep(0.05)
        os.close(ours)
        assert process.wait(LIMIT) == 75
    stop = json.loads(events.read_text().splitlines()[-1])
    assert (stop["kind"], stop["exit_code"]) == ("stop", 75)
    assert "SIGHUP" in stop["reason"]
    assert (run / CHECKPOINTS_FOLDER / f"step-{stop['step']:08d}" / "manifest.json").exists()
