"""A run as a JobSet, or as a TrainJob of Kubeflow Trainer with the runtime that it refers to.

Both make one indexed Job with a pod for each machine. A pod that ends with 75 has saved its state
and is replaced, whatever was counted before; one that ends with 2 was given wrong input and ends
all; any other failure ends the Job, which JobSet then makes anew, all pods together, at most
`max_restarts` times.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from posixpath import normpath
from typing import ClassVar, Literal

from armillary.foundation.errors import EXIT_BAD_INPUT, EXIT_RUN_ME_AGAIN, Problem
from armillary.launch.job import Job, one_line, option, prepared
from armillary.launch.yaml import Plain, to_documents

_GPU = "nvidia.com/gpu"
_LABEL = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?\Z")
_RESOURCE = re.compile(r"[a-z0-9./-]+=[0-9]+\Z")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTP]i?)?\Z")
_SPOILT = "wrongInput"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kubernetes(Job):
    """A pod on each machine, which starts the ranks there."""

    kind: ClassVar[str] = "kubernetes"
    suffix: ClassVar[str] = ".yaml"

    manifest: Literal["jobset", "trainjob"] = "jobset"
    """jobset, or trainjob of Kubeflow Trainer"""
    image: str = ""
    """container image with Armillary in it"""
    namespace: str = ""
    """to run in (default: that of kubectl)"""
    volumes: tuple[str, ...] = ()
    """CLAIM:/PATH, a persistent volume claim and where the pods see it; may be repeated"""
    secrets: tuple[str, ...] = ()
    """name of a Secret whose entries become variables of the ranks; may be repeated"""
    queue: str = ""
    """local queue of Kueue"""
    cpus_per_node: int = 0
    """cores that each pod asks for (default: none asked for)"""
    memory_per_node: str = ""
    """memory that each pod asks for, such as 512Gi"""
    shared_memory: str = ""
    """size of /dev/shm, such as 64Gi (default: as the cluster gives it, often 64 MiB)"""
    resources: tuple[str, ...] = ()
    """further NAME=COUNT of each pod, such as rdma/hca=8; may be repeated"""
    grace_seconds: int = 300
    """seconds from the request to stop to the kill"""

    @property
    def folder(self) -> str:
        """The run folder; by default on the first volume, as pods keep nothing."""
        if self.run or not self._mounts:
            return self.run
        return f"{self._mounts[0][1].rstrip('/')}/runs/{self.name}"

    @property
    def _mounts(self) -> list[tuple[str, str]]:
        """Claims, and where the pods see them."""
        return [(claim, path) for claim, _, path in (each.partition(":") for each in self.volumes)]

    def problems(self) -> list[Problem]:
        """See `Job.problems`."""
        return [*super(Kubernetes, self).problems(), *self._own_problems()]

    def _own_problems(self) -> Iterator[Problem]:
        if not re.match(r"[\w./:@-]+\Z", self.image, re.ASCII):
            yield Problem(
                f"--image {self.image!r}", "a container image", "--image REGISTRY/NAME:TAG"
            )
        for claim, path in self._mounts:
            if not _LABEL.match(claim) or not path.startswith("/"):
                yield Problem(f"--volumes {claim}:{path}", "CLAIM:/PATH", "--volumes data:/data")
            yield from one_line("volumes", path)
        if self.grace_seconds < 1:
            yield Problem(f"--grace-seconds {self.grace_seconds}", "1 or more")
        if self.cpus_per_node < 0:
            yield Problem(f"--cpus-per-node {self.cpus_per_node}", "0 or more")
        yield from self._names()
        paths = [path.rstrip("/") + "/" for _, path in self._mounts]
        if not normpath(self.folder).startswith(tuple(paths)):
            yield Problem(
                f"--run {self.folder or '(none)'} is on no volume, and pods keep nothing",
                allowed="a folder on a volume that all pods see",
                fix=f"--volumes CLAIM:/data --run /data/runs/{self.name}",
            )

    def _names(self) -> Iterator[Problem]:
        for field in ("namespace", "queue"):
            if (value := getattr(self, field)) and not _LABEL.match(value):
                yield Problem(f"{option(field)} {value!r}", "a-z, 0-9, . and -")
        for secret in self.secrets:
            if not _LABEL.match(secret):
                yield Problem(f"--secrets {secret!r}", "the name of a Secret: a-z, 0-9, . and -")
        for field in ("memory_per_node", "shared_memory"):
            if (value := getattr(self, field)) and not _QUANTITY.match(value):
                yield Problem(f"{option(field)} {value!r}", "a quantity", f"{option(field)} 64Gi")
        for each in self.resources:
            if not _RESOURCE.match(each):
                yield Problem(f"--resources {each!r}", "NAME=COUNT", "--resources rdma/hca=8")

    def submission(self, file: str) -> list[str]:
        """See `Job.submission`. Created, not applied, so that what runs is never altered."""
        return ["kubectl", "create", "-f", file]

    def render(self) -> str:
        """See `Job.render`."""
        return "# Written by `armillary launch kubernetes`.\n" + to_documents(self.documents())

    def documents(self) -> list[Plain]:
        """The objects that Kubernetes is asked to make, in this order."""
        if self.manifest == "jobset":
            meeting = f"{self.name}-trainer-0-0.{self.name}:{self.port}"
            container = self._container("trainer")
            container |= self._start("$(NODE_RANK)", meeting)
            container["env"] = [*self._variables(), _NODE_RANK]
            return [self._object("jobset.x-k8s.io/v1alpha2", "JobSet", self._set(container))]
        return [self._runtime(), self._train_job()]

    def _runtime(self) -> Plain:
        """Cluster-wide, so its metadata has no namespace."""
        return {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "ClusterTrainingRuntime",
            "metadata": {"name": self.name},
            "spec": {
                "mlPolicy": {"numNodes": self.nodes, "torch": {}},
                "template": {"spec": self._set(self._container("node"))},
            },
        }

    def _train_job(self) -> Plain:
        trainer: dict[str, Plain] = {
            "image": self.image,
            "numNodes": self.nodes,
            "numProcPerNode": self.ranks,
            **self._start("$(PET_NODE_RANK)", "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"),
            "resourcesPerNode": self._asked_for(),
        }
        if self.variables:
            trainer["env"] = self._variables()
        spec: dict[str, Plain] = {"runtimeRef": {"name": self.name}, "trainer": trainer}
        return self._object("trainer.kubeflow.org/v1alpha1", "TrainJob", spec)

    def _object(self, version: str, kind: str, spec: Plain) -> Plain:
        metadata: dict[str, Plain] = {"name": self.name}
        if self.namespace:
            metadata["namespace"] = self.namespace
        if self.queue:
            metadata["labels"] = {"kueue.x-k8s.io/queue-name": self.queue}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}

    def _set(self, container: dict[str, Plain]) -> Plain:
        """The JobSet's spec; the runtime of a TrainJob has one too."""
        name = container["name"]
        job: dict[str, Plain] = {
            "parallelism": self.nodes,
            "completions": self.nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "podFailurePolicy": {"rules": _rules(name)},
            "template": {"spec": self._pod(container)},
        }
        template: dict[str, Plain] = {"spec": job}
        if self.manifest == "trainjob":  # by this label the trainer finds what it fills in
            ancestor: dict[str, Plain] = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
            template = {"metadata": {"labels": ancestor}, **template}
        wrong: dict[str, Plain] = {
            "name": _SPOILT,
            "action": "FailJobSet",
            "onJobFailureReasons": ["PodFailurePolicy"],
        }
        return {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": self.max_restarts, "rules": [wrong]},
            "replicatedJobs": [{"name": name, "replicas": 1, "template": template}],
        }

    def _pod(self, container: dict[str, Plain]) -> Plain:
        volumes: list[Plain] = [
            {"name": f"volume-{index}", "persistentVolumeClaim": {"claimName": claim}}
            for index, (claim, _) in enumerate(self._mounts)
        ]
        if self.shared_memory:
            memory: Plain = {"medium": "Memory", "sizeLimit": self.shared_memory}
            volumes.append({"name": "shared-memory", "emptyDir": memory})
        return {
            "restartPolicy": "Never",  # a condition of podFailurePolicy
            "terminationGracePeriodSeconds": self.grace_seconds,
            "automountServiceAccountToken": False,
            "containers": [container],
            "volumes": volumes,
        }

    def _container(self, name: str) -> dict[str, Plain]:
        mounts: list[Plain] = [
            {"name": f"volume-{index}", "mountPath": path}
            for index, (_, path) in enumerate(self._mounts)
        ]
        if self.shared_memory:
            mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
        container: dict[str, Plain] = {
            "name": name,
            "image": self.image,
            "resources": self._asked_for(),
            "volumeMounts": mounts,
        }
        if self.secrets:
            container["envFrom"] = [{"secretRef": {"name": each}} for each in self.secrets]
        return container

    def _start(self, node_rank: str, meeting: str) -> dict[str, Plain]:
        """The command; Kubernetes fills `$(NAME)` in, and `$$` is how it writes a dollar."""
        words = [each.replace("$", "$$") for each in self.command()]
        words += ["--node-rank", node_rank, "--meet", meeting]
        if not self.setup:
            return {"command": [words[0]], "args": [*words[1:]]}
        script = "\n".join(prepared(self.setup, 'exec "$@"')).replace("$", "$$")
        shell = ["bash", "-c", script, "armillary-node"]
        return {"command": [*shell], "args": [*words]}

    def _variables(self) -> list[Plain]:
        return [
            {"name": name, "value": value.replace("$", "$$")}
            for name, value in self.variables.items()
        ]

    def _asked_for(self) -> Plain:
        limits: dict[str, Plain] = {_GPU: str(self.gpus_per_node)} if self.gpus_per_node else {}
        if self.cpus_per_node:
            limits["cpu"] = str(self.cpus_per_node)
        if self.memory_per_node:
            limits["memory"] = self.memory_per_node
        limits |= {
            name: count for name, _, count in (each.partition("=") for each in self.resources)
        }
        return {"limits": limits, "requests": dict(limits)}


_NODE_RANK: Plain = {
    "name": "NODE_RANK",
    "valueFrom": {
        "fieldRef": {
            "fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        }
    },
}


def _rules(container: Plain) -> Plain:
    """What the Job makes of the pods' exit codes; what no rule names is counted as a failure."""

    def on_code(action: str, code: int) -> Plain:
        codes: Plain = {"containerName": container, "operator": "In", "values": [code]}
        return {"action": action, "onExitCodes": codes}

    return [
        on_code("Ignore", EXIT_RUN_ME_AGAIN),
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        on_code("FailJob", EXIT_BAD_INPUT),
    ]
