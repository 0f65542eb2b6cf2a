"""Agents of torchrun, one for each host that a trial pretends to have."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

TESTS = Path(__file__).parents[1]
RENDEZVOUS = {
    "timeout": 180,
    "last_call_timeout": 5,  # seconds that a smaller world waits for more hosts
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 4,
}
"""Shorter than torchrun's own, so that a trial takes seconds; a real run keeps the defaults."""

A_STORE_FOR_EACH_START = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it, an agent that joins a run waits for an address that nobody leaves it (torch 2.13)."""

_SLOW_RECIPE = """
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from armillary.foundation.component import component
from armillary.recipe import recipe
from armillary.tasks.next_token import NextToken
from armillary.tasks.task import TaskConfig
sys.path.insert(0, {tests!r})
from tiny_runs import tiny_recipe

@component("slow")
@dataclass(frozen=True, kw_only=True, slots=True)
class Slow(TaskConfig):
    def weight(self, batch):
        return NextToken().weight(batch)

    def loss(self, model, batch):
        time.sleep({seconds})
        return NextToken().loss(model, batch)

@recipe("slow")
def slow():
    return replace(tiny_recipe(Path({folder!r}), steps={steps}), task=Slow())
"""


def write_slow_recipe(path: Path, *, steps: int, seconds: float) -> None:
    """A run of `tiny_runs` whose steps take a while and no processor: `PATH:slow`.

    Hosts can come and go meanwhile. The corpus is beside it.
    """
    text = _SLOW_RECIPE.format(
        tests=str(TESTS), folder=str(path.parent), steps=steps, seconds=seconds
    )
    path.write_text(text)


class Agent:
    """`torchrun` on one host; ends, with its ranks, when the context does."""

    def __init__(
        self,
        train: Sequence[str],
        *,
        endpoint: str,
        folder: Path,
        name: str,
        nodes: str = "1:2",
        nproc: int = 2,
        max_restarts: int = 3,
        serves: bool = True,
        prefix: Sequence[str] = (),
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts it in `folder`, where `NAME.log` takes what it and its ranks say.

        Args:
            serves: whether this agent is where hosts meet; one is, and has to stay.
            prefix: what the command is started by, such as `ip netns exec`.
            options: further ones of torchrun.
        """
        settings = RENDEZVOUS | {"is_host": int(serves)}
        command = [*prefix, sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes]
        command += ["--nproc-per-node", str(nproc), "--max-restarts", str(max_restarts)]
        command += ["--rdzv-backend", "c10d", "--rdzv-id", "trial", "--rdzv-endpoint", endpoint]
        command += ["--rdzv-conf", ",".join(f"{key}={value}" for key, value in settings.items())]
        command += [*options, "-m", "--", "armillary", "train", *train]
        variables = {"OMP_NUM_THREADS": "1"} | A_STORE_FOR_EACH_START
        self.log = folder / f"{name}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=os.environ | variables | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> Agent:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """Ends the agent and its ranks at once, as a host ends that loses its power."""
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def wait(self, seconds: float = 180.0) -> int:
        """Waits for its end and returns the exit code."""
        return self.process.wait(seconds)

    def said(self) -> str:
        """What it and its ranks have said so far."""
        return self.log.read_text(errors="replace")


def descendants(pid: int) -> list[int]:
    """The processes that one has started, and those that they have."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def until(
    enough: Callable[[], Any], agents: Sequence[Agent], what: str, seconds: float = 180.0
) -> Any:
    """Waits until `enough()` is true, and returns it.

    Raises:
        AssertionError: it took longer than `seconds`, or no agent is left; with what they said.
    """
    deadline = time.monotonic() + seconds
    while not (found := enough()):
        gone = all(agent.process.poll() is not None for agent in agents)
        if gone or time.monotonic() > deadline:
            said = "\n".join(f"--- {agent.log.name}\n{agent.said()[-6000:]}" for agent in agents)
            raise AssertionError(f"{what} did not come{' before the end' * gone}\n{said}")
        time.sleep(0.05)
    return found
