"""Where the ranks of this machine stand among those of a run. Loads no torch."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass

from armillary.foundation.errors import Problem

_LAST_PORT = 65_535


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One of the machines of a run, and where all of its ranks meet."""

    nodes: int = 1
    """Machines of the run, each with as many ranks."""
    node: int = 0
    """Number of this one, from 0; rank 0 is on machine 0."""
    meeting: str = ""
    """HOST:PORT of machine 0, where it listens; empty: a free port of this machine's loopback."""

    def problems(self) -> list[Problem]:
        """What keeps the ranks from meeting."""
        found = []
        if self.nodes < 1:
            found.append(Problem(f"--nodes {self.nodes}", "1 or more", "--nodes 1"))
        elif not 0 <= self.node < self.nodes:
            most = self.nodes - 1
            found.append(Problem(f"--node-rank {self.node}", f"0 to {most}", f"--node-rank {most}"))
        if self.meeting:
            host, _, port = self.meeting.rpartition(":")
            if not (host and port.isascii() and port.isdigit() and 0 < int(port) <= _LAST_PORT):
                found.append(_where(f"--meet {self.meeting} is no address"))
        elif self.nodes > 1:
            found.append(_where(f"--nodes {self.nodes} without --meet: the ranks cannot meet"))
        return found

    def settled(self) -> Place:
        """The same place with a meeting point, so that all ranks are told of the same one."""
        if self.meeting:
            return self
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("127.0.0.1", 0))
            return Place(meeting=f"127.0.0.1:{probe.getsockname()[1]}")

    def rank(self, local_rank: int, nproc: int) -> int:
        """Number of a rank of this machine over the whole run."""
        return self.node * nproc + local_rank

    def environment(self, local_rank: int, nproc: int) -> dict[str, str]:
        """What one of the `nproc` ranks here needs to find the others, and its share of the cores.

        Only for a settled place.
        """
        host, _, port = self.meeting.rpartition(":")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        threads = str(max(1, (cores or 1) // nproc))
        environment = {
            "RANK": str(self.rank(local_rank, nproc)),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(nproc * self.nodes),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": host.strip("[]"),
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
        }
        if sys.platform == "linux" and self.nodes == 1:
            # All ranks are here: no need to depend on how this machine's name resolves.
            environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        return environment


def _where(message: str) -> Problem:
    return Problem(
        message, "HOST:PORT of machine 0, the same for all", "--meet $(hostname):29500, on each"
    )
