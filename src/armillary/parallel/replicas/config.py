"""What a recipe says about replica groups. Loads no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

from armillary.foundation.component import Component, component
from armillary.foundation.errors import Problem


class Synchronisation(Component, ABC):
    """When replica groups agree on the weights, and how."""

    __slots__ = ()

    @property
    @abstractmethod
    def round_steps(self) -> int:
        """Optimizer steps that each group takes by itself; 0: every step is one of all groups."""

    @abstractmethod
    def problems(self) -> list[Problem]:
        """What is wrong with the values."""


@component("every-step")
@dataclass(frozen=True, kw_only=True, slots=True)
class EveryStep(Synchronisation):
    """Gradients are summed over the groups in each step: the answer of one large run."""

    @property
    def round_steps(self) -> int:
        """See `Synchronisation`."""
        return 0

    def problems(self) -> list[Problem]:
        """See `Synchronisation`."""
        return []


@component("local-sgd")
@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSGD(Synchronisation):
    """Weights are averaged after some steps of each group. (Stich 2018, arXiv 1805.09767)"""

    every: int = 16
    """Optimizer steps between averages."""

    @property
    def round_steps(self) -> int:
        """See `Synchronisation`."""
        return self.every

    def problems(self) -> list[Problem]:
        """See `Synchronisation`."""
        return list(_every(self.every))


@component("diloco")
@dataclass(frozen=True, kw_only=True, slots=True)
class DiLoCo(Synchronisation):
    """The mean way of the groups is the gradient of an outer optimizer, SGD with Nesterov momentum.

    (Douillard et al. 2023, arXiv 2311.08105, algorithm 1)
    """

    every: int = 64
    """Optimizer steps between outer steps."""
    lr: float = 0.7
    """Rate of the outer step."""
    momentum: float = 0.9
    """Of the outer step, in [0, 1)."""

    @property
    def round_steps(self) -> int:
        """See `Synchronisation`."""
        return self.every

    def problems(self) -> list[Problem]:
        """See `Synchronisation`."""
        found = list(_every(self.every))
        if not self.lr > 0:
            found.append(
                Problem(
                    f"replicas.mode.lr = {self.lr} is out of range",
                    "above 0",
                    "--replicas.mode.lr 0.7",
                )
            )
        if not 0 <= self.momentum < 1:
            found.append(
                Problem(
                    f"replicas.mode.momentum = {self.momentum} is out of range",
                    "0 or more, below 1",
                    "--replicas.mode.momentum 0.9",
                )
            )
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """Groups of ranks, each a run by itself with a mesh of its own, that train one model together.

    Each group has its own command, run folder and mesh (the same in all); a lighthouse tells who is
    there. A group that is lost costs the others the step in flight; one that comes back gets the
    state of a peer.
    """

    groups: int = 1
    """Groups that share the global batch when all are there."""
    group: int = 0
    """Which of them this run is, from 0."""
    lighthouse: str = ""
    """HOST:PORT of `armillary lighthouse`; empty: one group, which needs none."""
    host: str = "127.0.0.1"
    """Address of this machine at which the other groups reach it. The default is this machine
    alone."""
    mode: Synchronisation = field(default_factory=EveryStep)
    """When the groups agree."""
    timeout_seconds: float = 120.0
    """How long an exchange waits for a group that is there and silent. An exchange that broke off
    is done again, so it may be shorter than a first step that compiles."""
    meeting_seconds: float = 3600.0
    """How long a group waits for the lighthouse, or for peers that are at work, before it fails."""

    @property
    def alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return not self.lighthouse

    def problems(self) -> list[Problem]:
        """What is wrong with the values."""
        return [*self._own_problems(), *self.mode.problems()]

    def _own_problems(self) -> Iterator[Problem]:
        if self.groups < 1:
            yield Problem(
                f"replicas.groups = {self.groups} is out of range",
                "1 or more",
                "--replicas.groups 1",
            )
        elif not 0 <= self.group < self.groups:
            yield Problem(
                f"replicas.group = {self.group} is none of replicas.groups = {self.groups}",
                f"0 to {self.groups - 1}",
                "--replicas.group 0",
            )
        if self.lighthouse and address(self.lighthouse) is None:
            yield Problem(
                f"replicas.lighthouse = {self.lighthouse} is no address",
                "HOST:PORT",
                "--replicas.lighthouse 127.0.0.1:29510",
            )
        if self.groups > 1 and self.alone:
            yield Problem(
                f"replicas.groups = {self.groups}, and replicas.lighthouse is empty",
                "HOST:PORT, where `armillary lighthouse` listens",
                "--replicas.lighthouse 127.0.0.1:29510",
            )
        for name in ("timeout_seconds", "meeting_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                yield Problem(
                    f"replicas.{name} = {getattr(self, name)} is out of range",
                    "above 0, and finite",
                    f"--replicas.{name.replace('_', '-')} 120",
                )


def address(text: str) -> tuple[str, int] | None:
    """Host and port of HOST:PORT, or of [HOST]:PORT for an IPv6 host; None where it is neither."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        return None
    if any(sign in host for sign in "/@ "):
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)


def _every(every: int) -> Iterator[Problem]:
    if every < 1:
        yield Problem(
            f"replicas.mode.every = {every} is out of range",
            "1 or more",
            "--replicas.mode.every 16",
        )
