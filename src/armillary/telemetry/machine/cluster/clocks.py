"""How far the hosts' clocks are apart, by sending the time to and fro.

Cristian 1989, "Probabilistic clock synchronization": who asks at t0 and has the answer T at t1
knows that the other's clock is ahead by T - (t0 + t1) / 2, give or take (t1 - t0) / 2; the fastest
of several tries says most.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from armillary.telemetry.format import count_of
from armillary.telemetry.machine.finding import Finding, finding

_TRIES = 10
_FAR_APART = 0.1


@dataclass(frozen=True, slots=True)
class Offset:
    """A clock against rank 0's."""

    seconds: float
    """How far it is ahead."""
    error: float
    """By how much that may be wrong, in seconds."""


def measure_offsets(asked: Sequence[int], rank: int) -> dict[int, Offset]:
    """Clocks of the ranks that are asked, by rank 0, which alone gets an answer.

    To be called by all ranks of the default process group.
    """
    offsets = {}
    for other in asked:
        if other == 0:
            continue
        if rank == 0:
            offsets[other] = min((_ask(other) for _ in range(_TRIES)), key=lambda each: each.error)
        elif rank == other:
            for _ in range(_TRIES):
                _answer()
    return offsets


def _ask(other: int) -> Offset:
    there = torch.zeros(1, dtype=torch.float64)
    asked = time.time()
    dist.send(there, other)
    dist.recv(there, other)
    answered = time.time()
    return offset_of(asked, float(there), answered)


def _answer() -> None:
    now = torch.zeros(1, dtype=torch.float64)
    dist.recv(now, 0)
    dist.send(now.fill_(time.time()), 0)


def offset_of(asked: float, there: float, answered: float) -> Offset:
    """The estimate of one try."""
    return Offset(there - (asked + answered) / 2, (answered - asked) / 2)


def clocks_finding(offsets: Mapping[int, Offset], hosts: Sequence[str]) -> Finding:
    """Whether clocks agree; those that are certainly far off are named."""
    if not offsets:
        return finding("clocks", "one host, one clock")
    worst = max(offsets, key=lambda rank: abs(offsets[rank].seconds))
    seconds, error = offsets[worst].seconds, offsets[worst].error
    advice = ""
    if abs(seconds) - error > _FAR_APART:
        advice = f"set the clock of {hosts[worst]} (chrony, NTP): times in logs do not compare"
    text = (
        f"{count_of(len(offsets), 'other host')}, at most {abs(seconds) * 1e3:.1f} ms apart"
        f" ({hosts[worst]}, +-{error * 1e3:.1f} ms)"
    )
    values = {hosts[rank]: each.seconds for rank, each in offsets.items()}
    return finding("clocks", text, advice, offset_seconds=values)
