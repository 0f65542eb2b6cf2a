"""Who can connect to a run on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LISTENING = "0A"  # TCP_LISTEN of linux/tcp_states.h
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def sockets_of(group: int) -> set[str]:
    """Inodes of the sockets of all processes that descend from one."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    family = {group}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    inodes = set()
    for pid in family:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = str(link.readlink())
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    return inodes


def listeners(inodes: set[str]) -> set[str]:
    """Addresses on which these sockets listen, as /proc writes them."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENING and rest[5] in inodes:
                found.add(local.partition(":")[0])
    return found


@pytest.mark.full
def test_a_run_on_one_machine_listens_on_its_loopback_only(tmp_path: Path) -> None:
    typed = ["train", "debug", "--nproc", "2", "--parallel.device", "cpu"]
    run = subprocess.Popen(
        [sys.executable, "-m", "armillary", *typed, "--run", str(tmp_path / "run")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    seen: set[str] = set()
    events = tmp_path / "run" / "events.jsonl"
    try:
        while not events.exists() or '"kind":"step"' not in events.read_text():
            assert run.poll() is None
            seen |= listeners(sockets_of(run.pid))
            time.sleep(0.1)
        seen |= listeners(sockets_of(run.pid))
    finally:
        run.send_signal(signal.SIGTERM)
        run.wait(60)
    assert seen, "the ranks met nowhere"
    assert seen <= LOOPBACK
