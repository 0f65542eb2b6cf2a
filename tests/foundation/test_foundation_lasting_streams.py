"""Messages to a terminal that is lost."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SPEAKS = """
import sys
from armillary.foundation.lasting_streams import outlive_terminal

if sys.argv[1] == "lasting":
    outlive_terminal()
print("shown", file=sys.stderr)
sys.stdin.readline()
print("not shown")
print("not shown", file=sys.stderr)
sys.exit(75)
"""


@pytest.mark.parametrize(("how", "code"), [("lasting", 75), ("as python has it", 1)])
def test_a_process_may_go_on_speaking_to_a_terminal_that_is_lost(how: str, code: int) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", SPEAKS, how]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        with os.fdopen(os.dup(ours), "rb", buffering=0) as terminal:
            assert terminal.readline() == b"shown\r\n"
        os.close(ours)
        process.communicate(b"\n", timeout=60)
        assert process.returncode == code
