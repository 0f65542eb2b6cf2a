"""A run as a SkyPilot task, for `sky jobs launch`, which recovers it on other machines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from armillary.foundation.errors import EXIT_RUN_ME_AGAIN, Problem
from armillary.launch.job import Job, a_word, option, prepared, shown
from armillary.launch.yaml import Plain, to_yaml

_STORES = re.compile(r"(s3|gs|gcs|az|abfs)://[^\s@]+\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class SkyPilot(Job):
    """A managed job: one that ends with 75 is recovered, others `max_restarts` times."""

    kind: ClassVar[str] = "skypilot"
    suffix: ClassVar[str] = ".sky.yaml"

    accelerator: str = "H100"
    """kind of GPU, as SkyPilot names it"""
    infra: str = ""
    """cloud[/region[/zone]] to run in (default: where it is cheapest)"""
    use_spot: bool = False
    """take machines that may be called back"""
    disk_size: int = 512
    """GB of each machine's disk"""
    image: str = ""
    """container image or machine image"""
    workdir: str = "."
    """folder that is copied to the machines; the setup runs in it"""
    storage: str = ""
    """s3://..., gs://... below which the checkpoints go, as --checkpoint.folder"""
    install: str = "pip install armillary"
    """a line of shell that each machine runs once"""

    def command(self) -> list[str]:
        """See `Job.command`. What must outlast the machines, the checkpoints, goes elsewhere."""
        words = super(SkyPilot, self).command()
        folder = f"{self.storage.rstrip('/')}/{self.name}"
        return [*words, "--checkpoint.folder", folder] if self.storage else words

    def problems(self) -> list[Problem]:
        """See `Job.problems`."""
        return [*super(SkyPilot, self).problems(), *self._own_problems()]

    def _own_problems(self) -> Iterator[Problem]:
        for field in ("accelerator", "infra"):
            yield from a_word(field, getattr(self, field))
        for field in ("image", "workdir", "install"):
            yield from shown(field, getattr(self, field))
        if self.disk_size < 1:
            yield Problem(f"--disk-size {self.disk_size}", "1 or more", "--disk-size 512")
        if self.storage and not _STORES.match(self.storage):
            yield Problem(f"{option('storage')} is no object store", "s3://NAME, gs://NAME, ...")
        if not self.run and not self.storage:
            yield Problem(
                "--storage and --run are not given: the checkpoints would go with the machines",
                allowed="an object store, or a run folder on storage that all machines share",
                fix="--storage s3://BUCKET",
            )

    def submission(self, file: str) -> list[str]:
        """See `Job.submission`."""
        return ["sky", "jobs", "launch", "--yes", file]

    def render(self) -> str:
        """See `Job.render`."""
        return "# Written by `armillary launch skypilot`.\n" + to_yaml(self.task())

    def task(self) -> dict[str, Plain]:
        """The task, as plain values."""
        resources: dict[str, Plain] = {"disk_size": self.disk_size}
        if self.gpus_per_node:
            resources["accelerators"] = f"{self.accelerator}:{self.gpus_per_node}"
        if self.infra:
            resources["infra"] = self.infra
        if self.use_spot:
            resources["use_spot"] = True
        if self.image:
            resources["image_id"] = self.image
        resources["job_recovery"] = {
            "max_restarts_on_errors": self.max_restarts,
            "recover_on_exit_codes": [EXIT_RUN_ME_AGAIN],
        }
        task: dict[str, Plain] = {
            "name": self.name,
            "num_nodes": self.nodes,
            "workdir": self.workdir,
            "resources": resources,
        }
        if self.variables:
            task["envs"] = {**self.variables}
        if self.install:
            task["setup"] = self.install
        task["run"] = self._run()
        return task

    def _run(self) -> str:
        head = f'meet="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{self.port}"'
        start = (
            f'exec {shlex.join(self.command())} --node-rank "$SKYPILOT_NODE_RANK" --meet "$meet"'
        )
        return "\n".join([head, *prepared(self.setup, start)])
