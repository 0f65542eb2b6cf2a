"""A writer that is killed, at every point and at random ones, loses nothing it called durable."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import ranks
from armillary.checkpoint.config import Checkpoint
from armillary.checkpoint.find import find_checkpoint
from armillary.checkpoint.places.local import LocalPlace
from armillary.checkpoint.ranks import Ranks
from armillary.checkpoint.store import CheckpointStore
from armillary.checkpoint.tensors import flatten, read_tensors, stored_tensors
from armillary.checkpoint.verify import verify

_CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir"}


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((1 << 16,), float(step))}}


def write(folder: Path, steps: list[int], kill_at: int, report: Connection) -> None:
    """Saves each step; dies before the `kill_at`-th change to the file system, if that comes."""
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # only the process dies here, not the machine: save time
    seen = 0

    def count(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        opens_to_write = name == "open" and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if name in _CHANGES or (opens_to_write and str(folder) in str(arguments[0])):
            seen += 1
            if seen == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    def tell(kind: str, fields: dict[str, Any]) -> None:
        report.send((fields.get("state"), fields["step"]))

    sys.addaudithook(count)
    for step in steps:  # a store for each, so that a step can be written over
        store = CheckpointStore(folder, Checkpoint(asynchronous=False), tell)
        store.save(step, state_of(step), {"tokens_total": step})
    report.send(("end", seen))


def write_in_forks(base: Path, steps: list[int], kills: range, report: Connection) -> None:
    """For each kill, `write`s to a copy of `base` in a fork of this process, which has torch."""
    for kill_at in kills:
        folder = shutil.copytree(base, base.with_name(f"killed-{kill_at}"))
        child = os.fork()
        if child == 0:
            try:
                write(folder, steps, kill_at, report)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert status == signal.SIGKILL, (kill_at, status)
        report.send(("next", kill_at))


class Child:
    """A process that runs a function with a pipe as its last argument."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        context = ranks._context()  # shares the warm server of the tests on ranks
        self.report, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=function, args=(*arguments, theirs))
        self.process.start()
        theirs.close()

    def ends(self) -> list[tuple[str, int]]:
        """Everything it still reports until it ends or dies."""
        reported = []
        try:
            while True:
                reported.append(self.report.recv())
        except EOFError:
            self.process.join()
            return reported


def prove(folder: Path, reported: list[tuple[str, int]], before: int) -> None:
    """All that is left is whole checkpoints, the newest at least as new as the newest durable."""
    place = LocalPlace(folder)
    place.clean()
    assert [verify(place, name)["step"] for name in place.names()]
    newest = max([before, *(step for state, step in reported if state == "durable")])
    found = find_checkpoint(place, "auto")
    assert found is not None and found.step >= newest, (found, reported)
    wanted = state_of(0)
    stored = stored_tensors(place, found.folder)
    read_tensors(place, found.folder, flatten(wanted), Ranks(), stored)
    assert bool((wanted["model"]["weight"] == found.step).all())


def test_a_kill_before_any_change_on_disk_loses_nothing_durable(tmp_path: Path) -> None:
    base = tmp_path / "base"
    assert Child(write, base, [10, 20], 0).ends()[-1][0] == "end"
    # Writes a new checkpoint, which retires the oldest, then the same step over it.
    steps = [30, 30]
    end, changes = Child(write, shutil.copytree(base, tmp_path / "whole"), steps, 0).ends()[-1]
    assert end == "end" and changes > 20
    reported: list[tuple[str, int]] = []
    kills = []
    for event in Child(write_in_forks, base, steps, range(1, changes + 1)).ends():
        if event[0] != "next":
            reported.append(event)
            continue
        kills.append(event[1])
        prove(tmp_path / f"killed-{event[1]}", reported, before=20)
        reported.clear()
    assert kills == list(range(1, changes + 1))


def test_a_kill_at_a_random_moment_loses_nothing_durable(tmp_path: Path) -> None:
    folder, chance, newest = tmp_path / "checkpoints", random.Random(0), 0
    for _ in range(10):
        child = Child(write, folder, list(range(newest + 1, newest + 1000)), 0)
        reported = [child.report.recv() for _ in range(chance.randrange(1, 6))]
        child.report.poll(chance.uniform(0, 0.02))  # lets it get somewhere into its next write
        child.process.kill()
        reported += child.ends()
        assert reported[-1][0] != "end"
        prove(folder, reported, before=newest)
        newest = max(newest, *(step for state, step in reported if state == "durable"))
    assert newest >= 10
