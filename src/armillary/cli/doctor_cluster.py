"""`armillary doctor --cluster`: what the ranks of a run find out before hours are spent.

They look at themselves, at what lies between them, and at the folder they share. Every rank calls
all of this alike.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from armillary.checkpoint.config import Checkpoint
from armillary.checkpoint.ranks import Failure, Ranks
from armillary.checkpoint.store import CheckpointStore
from armillary.cli.recipe_arguments import DEFAULT_RECIPE, resolve
from armillary.foundation.errors import ArmillaryError, UserError
from armillary.foundation.run_folder import RUNS_FOLDER
from armillary.foundation.tell import seen_by_every_rank
from armillary.parallel import process
from armillary.parallel.mesh import Mesh
from armillary.recipe.recipe import Recipe
from armillary.telemetry.format import byte_count
from armillary.telemetry.machine.cluster import clocks, collectives, facts, storage
from armillary.telemetry.machine.finding import Finding, finding

_TIMEOUT_SECONDS = 120.0
_EXCHANGED = {"cpu": 2**23, "cuda": 2**27}
"""Bytes of a collective, by kind of device; a quick look takes a sixteenth."""
_INNERMOST = ("tp", "expert_tp")
_OF_EXPERTS = ("expert_fsdp", "ep", "expert_tp")
_WAITS_APART = 5.0
_CHECKPOINTS = ".armillary-doctor-checkpoints"


def recipe_of(arguments: argparse.Namespace, world_size: int) -> Recipe:
    """The recipe, of which only the mesh and the place of the checkpoints matter.

    Raises:
        UserError: the mesh does not fit the ranks.
    """
    with seen_by_every_rank():
        recipe = resolve(arguments.recipe_tokens, default=DEFAULT_RECIPE).recipe
        if found := [*recipe.parallel.problems(world_size), *recipe.checkpoint.problems()]:
            raise UserError(found)
    return recipe


def examine_cluster(recipe: Recipe, folder: Path, *, quick: bool) -> Iterator[Finding]:
    """Looks at one thing after another. What breaks between ranks is a finding, and the last."""
    device = process.choose_device(recipe.parallel.device)
    joined = process.init_process_group(device, _TIMEOUT_SECONDS)
    try:
        mesh, ranks = Mesh.create(recipe.parallel, device), Ranks(_give_up_after(_TIMEOUT_SECONDS))
        yield from _Examination(mesh, ranks, recipe, folder, quick).all()
    except (RuntimeError, Failure) as error:
        words = str(error).splitlines()[0]
        advice = "is a rank gone, or a port closed between hosts? ARMILLARY_TRACEBACK=1 shows where"
        yield finding("ranks", f"they lost each other: {words}", advice, verdict="fail")
        if os.environ.get("ARMILLARY_TRACEBACK") == "1":
            raise
    finally:
        if joined:
            process.destroy()


def _give_up_after(seconds: float) -> Callable[[], None]:
    """What `Ranks` calls once a second while it waits: a hung rank is a finding too."""
    began = last = 0.0

    def on_wait() -> None:
        nonlocal began, last
        now = time.monotonic()
        if now - last > _WAITS_APART:
            began = now
        last = now
        if now - began > seconds:
            raise RuntimeError(f"a rank has not answered for {seconds:.0f} s")

    return on_wait


@dataclass(frozen=True, slots=True)
class _Examination:
    mesh: Mesh
    ranks: Ranks
    recipe: Recipe
    folder: Path
    quick: bool

    def all(self) -> Iterator[Finding]:
        """In the order shown; versions first, as others may fail because of them."""
        each = self.ranks.together(lambda: facts.facts_of(self.mesh.device, quick=self.quick))
        yield from facts.compare(each)
        hosts = [fact.host for fact in each]
        first = {host: hosts.index(host) for host in dict.fromkeys(hosts)}  # one rank of each host
        speakers = list(first.values())
        offsets = clocks.measure_offsets(speakers, self.ranks.rank)
        yield clocks.clocks_finding(self.ranks.on_main(lambda: offsets), hosts)
        yield from self._collectives(hosts)
        yield from self._storage(speakers, hosts)
        yield self._round_trip(self.recipe.checkpoint.folder or str(self.folder / _CHECKPOINTS))

    def _collectives(self, hosts: list[str]) -> Iterator[Finding]:
        if not self.ranks.distributed:
            return
        size = _EXCHANGED[self.mesh.device.type] // (16 if self.quick else 1)
        world = dist.group.WORLD
        assert world is not None
        has_experts = "ep" in self.recipe.model.divisors()
        for axis in collectives.OPERATIONS:
            if axis in _OF_EXPERTS and not has_experts:
                continue
            if (group := world if axis == "world" else self.mesh.group(axis)) is None:
                continue
            members = tuple(dist.get_process_group_ranks(group))
            measure = functools.partial(
                collectives.measure_axis, axis, group, members, self.mesh.device, size
            )
            seen = self.ranks.together(measure)
            yield from collectives.axis_findings(axis, seen, hosts, _INNERMOST)

    def _storage(self, speakers: list[int], hosts: list[str]) -> Iterator[Finding]:
        """One rank of each host writes; all at once, as they would a checkpoint."""
        rank, size = self.ranks.rank, (4 if self.quick else 64) << 20

        def write() -> float | str | None:
            return storage.write_rate(self.folder, size) if rank in speakers else None

        rates = self.ranks.together(write)
        written = {each: rate for each, rate in enumerate(rates) if rate is not None}
        disk = storage.disk_finding(self.folder, written, hosts)
        yield disk
        if disk.verdict == "fail":
            return
        name = self.ranks.on_main(lambda: uuid.uuid4().hex)
        probe = self.ranks.on_main(lambda: storage.leave_probe(self.folder, name))

        def look() -> float | None:
            return storage.sees_probe(self.folder, name) if rank in speakers else None

        seen = self.ranks.together(look)
        self.ranks.on_main(probe.unlink)
        yield storage.shared_finding(self.folder, {each: seen[each] for each in speakers}, hosts)

    def _round_trip(self, address: str) -> Finding:
        """A checkpoint of random numbers, saved, verified, loaded and compared, then removed."""
        bytes_each = (1 if self.quick else 32) << 20
        names = [f"tensors.{rank}" for rank in range(self.ranks.size)]
        tensor = torch.rand(bytes_each // 4)
        config = Checkpoint(asynchronous=False, retry_seconds=0.0)
        on_wait = _give_up_after(_TIMEOUT_SECONDS)
        begun = time.perf_counter()
        try:
            with CheckpointStore(address, config, on_wait=on_wait) as store:
                store.save(1, {names[self.ranks.rank]: tensor}, {"tokens_total": 0, "cursor": 0})
                store.wait(raise_failure=True)
                saved = time.perf_counter()
                loaded = torch.zeros_like(tensor)
                found = store.find("1")
                assert found is not None
                store.load(found, {names[self.ranks.rank]: loaded})
                equal = all(self.ranks.together(lambda: torch.equal(tensor, loaded)))
                done = time.perf_counter()
                self.ranks.on_main(lambda: store.place.remove(found.folder))
        except ArmillaryError as error:
            text = error.problems[0].message
            return finding("checkpoint", text, "repair this before training", verdict="fail")
        finally:
            if not self.recipe.checkpoint.folder:
                self.ranks.on_main(lambda: shutil.rmtree(address, ignore_errors=True))
        size = bytes_each * self.ranks.size
        text = (
            f"{byte_count(size)} saved in {saved - begun:.1f} s,"
            f" verified and loaded in {done - saved:.1f} s"
        )
        if not equal:
            text, advice = "what was loaded is not what was saved", "do not train: check the disks"
            return finding("checkpoint", text, advice, verdict="fail")
        return finding(
            "checkpoint",
            text,
            bytes=size,
            save_seconds=saved - begun,
            load_seconds=done - saved,
        )


def folder_of(arguments: argparse.Namespace) -> Path:
    """Where the run would be."""
    return Path(arguments.run or RUNS_FOLDER).expanduser().absolute()
