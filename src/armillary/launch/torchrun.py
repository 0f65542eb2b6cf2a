"""A run as one torchrun line for each machine, for those who start machines by hand."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from armillary.foundation.errors import Problem
from armillary.launch.job import Job, a_word, exports, prepared

_FOR_NEWCOMERS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it, a machine that joins waits for an address that nobody leaves it (torch 2.13)."""

_ASKS_FOR_HOST = """\
meeting_host=${1:?where the machines meet: give the name of one of them, the same on each}"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Torchrun(Job):
    """With a range of machines the run is elastic: who leaves or comes has all begin again from the
    newest checkpoint, with the same batch and the same order of the data."""

    kind: ClassVar[str] = "torchrun"
    suffix: ClassVar[str] = ".sh"

    min_nodes: int = 0
    """machines that are enough (default: all of them)"""
    hosts: tuple[str, ...] = ()
    """names of the machines, may be repeated; the first is where they meet"""

    def problems(self) -> list[Problem]:
        """See `Job.problems`."""
        return [*super(Torchrun, self).problems(), *self._own_problems()]

    def _own_problems(self) -> Iterator[Problem]:
        if self.min_nodes and not 1 <= self.min_nodes <= self.nodes:
            yield Problem(f"--min-nodes {self.min_nodes}", f"1 to {self.nodes}", "--min-nodes 1")
        for host in self.hosts:
            yield from a_word("hosts", host)
        if self.hosts and len(self.hosts) != self.nodes:
            yield Problem(f"{len(self.hosts)} --hosts for --nodes {self.nodes}", "one for each")

    @property
    def world_sizes(self) -> list[int]:
        """Each number of ranks that the run may have."""
        return [nodes * self.ranks for nodes in range(self.min_nodes or self.nodes, self.nodes + 1)]

    def submission(self, file: str) -> list[str]:
        """See `Job.submission`."""
        return []

    def next_step(self, file: str) -> str:
        """See `Job.next_step`."""
        typed = shlex.join(["bash", file])
        if self.hosts:
            return f"{typed}, on each of {', '.join(self.hosts)}"
        return f"{typed} HOST, on each machine; HOST is where they meet, the same for all"

    def render(self) -> str:
        """See `Job.render`."""
        where = "each of " + ", ".join(self.hosts) if self.hosts else "each machine"
        lines = [
            "#!/bin/bash",
            f"# Written by `armillary launch torchrun`. Run this on {where}.",
            "# torchrun ends with 1 also when the run was stopped with its state saved (75): ask",
            f"# armillary runs show {shlex.quote(self.folder)} --json",
            *([] if self.hosts else [_ASKS_FOR_HOST]),
            *exports(_FOR_NEWCOMERS | self.variables if self.min_nodes else self.variables),
            *prepared(self.setup, f"exec {self._line()}"),
        ]
        return "\n".join(lines) + "\n"

    def _line(self) -> str:
        nodes = f"{self.min_nodes}:{self.nodes}" if self.min_nodes else str(self.nodes)
        options = [
            f"--nnodes={nodes}",
            f"--nproc-per-node={self.ranks}",
            f"--max-restarts={self.max_restarts}",
            f"--rdzv-id={self.name}",
            "--rdzv-backend=c10d",
        ]
        first = shlex.quote(self.hosts[0]) if self.hosts else '"$meeting_host"'
        train = ["-m", "--", "armillary", "train", *self.recipe, "--run", self.folder]
        meeting = f"--rdzv-endpoint={first}:{self.port}"
        return f"torchrun {shlex.join(options)} {meeting} {shlex.join(train)}"
