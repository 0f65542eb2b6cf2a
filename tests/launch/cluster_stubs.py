"""Stand-ins for the programs of a cluster: tiny scripts in a folder that comes first in PATH."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SRUN = f"""#!{sys.executable} -S
# Starts the command once for each node, passes signals on but those that end the step at once, as
# srun does, and ends with the highest exit code.
import os, signal, subprocess, sys
words = sys.argv[1:]
nodes = 1
while words[0].startswith("--"):
    name, _, value = words.pop(0).partition("=")
    nodes = int(value) if name == "--nodes" else nodes
tasks = []
def pass_on(number, frame):
    for task in tasks:
        task.send_signal(number if number == signal.SIGUSR1 else signal.SIGKILL)
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
    signal.signal(number, pass_on)
for node in range(nodes):
    environment = dict(os.environ, SLURM_NODEID=str(node))
    tasks.append(subprocess.Popen(words, env=environment, start_new_session=True))
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""

SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then
    printf '127.0.0.1\\n127.0.0.2\\n'
else
    echo "$@" >> "$STUBS/scontrol.log"
fi
"""

SAYS_ITS_WORDS = f"""#!{sys.executable} -S
import json, os, sys
with open(os.environ["STUBS"] + "/words-" + os.environ.get("SLURM_NODEID", "0"), "w") as file:
    json.dump(sys.argv[1:], file)
"""


class Stubs:
    """A folder of programs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.add("srun", SRUN)
        self.add("scontrol", SCONTROL)

    def add(self, name: str, text: str) -> None:
        """A program of this name."""
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)

    def environment(self, **more: str) -> dict[str, str]:
        """What a script of Slurm sees, with the stubs before all else."""
        return {
            **os.environ,
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "STUBS": str(self.folder),
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_NODELIST": "node[0-1]",
            "ARMILLARY_RESTART_SECONDS": "0",
            **more,
        }

    def run(self, script: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Runs a script of bash to its end."""
        return subprocess.run(
            ["bash", "-c", script],
            env=self.environment(**more),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def words(self, node: int = 0) -> list[str]:
        """What the stub that says its words was called with."""
        found: list[str] = json.loads((self.folder / f"words-{node}").read_text())
        return found

    def requeued(self) -> list[str]:
        """What scontrol was asked to do."""
        log = self.folder / "scontrol.log"
        return log.read_text().splitlines() if log.exists() else []
