"""A signal that reaches ranks before they listen."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from armillary.launch import local

LISTENS_LATE = """
import signal, sys
missing = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1} - signal.pthread_sigmask(0, [])
sys.exit(len(missing))
"""


def test_only_ranks_that_will_listen_begin_with_signals_blocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "listens_late.py"
    program.write_text(LISTENS_LATE)
    command = (sys.executable, str(program))
    assert local.launch(["train"], 2, program=command) == 3
    monkeypatch.setattr(local, "PROGRAM", command)
    assert local.launch(["train"], 2, program=command) == 0
    assert local.launch(["replay"], 2, program=command) == 3  # it dies of them, as it should
