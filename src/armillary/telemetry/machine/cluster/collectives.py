"""How fast, and whether rightly, ranks exchange data over each axis of a mesh.

Bandwidth is that of the bus: bytes that must pass through each rank's link, whatever the algorithm,
over the time (nccl-tests, doc/PERFORMANCE.md). All groups of an axis are at work at once, as in
training.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from armillary.telemetry.format import byte_count, count_of
from armillary.telemetry.machine.finding import Finding, finding

OPERATIONS = {
    "world": ("all_reduce",),
    "tp": ("all_gather", "reduce_scatter"),
    "cp": ("all_gather",),
    "fsdp": ("all_gather", "reduce_scatter"),
    "dp_replicate": ("all_reduce",),
    "expert_fsdp": ("all_gather", "reduce_scatter"),
    "ep": ("all_to_all",),
    "expert_tp": ("all_gather", "reduce_scatter"),
    "pp": ("send",),
}
"""What training does most on each axis."""

# torch 2.13 gave two of them new names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_WARM_UP, _LATENCY_TRIES, _BANDWIDTH_TRIES = 2, 20, 5
_FAR_BEHIND = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One operation of one group, as one of its ranks saw it."""

    operation: str
    """Of `OPERATIONS`."""
    members: tuple[int, ...]
    """Ranks of the group, counted over the run."""
    bytes: int = 0
    """Exchanged, as the operation counts them."""
    seconds: float = 0.0
    """Median time of these bytes."""
    latency_seconds: float = 0.0
    """Median time of a few bytes."""
    right: bool = True
    """Whether the result is what it should be."""

    @property
    def bytes_per_second(self) -> float:
        """Bandwidth of the bus."""
        others = (len(self.members) - 1) / len(self.members)
        passing = {"all_reduce": 2 * others, "send": 1.0}.get(self.operation, others)
        return passing * self.bytes / self.seconds


def measure_axis(
    axis: str, group: ProcessGroup, members: tuple[int, ...], device: torch.device, size: int
) -> list[Exchange]:
    """Each operation of an axis; to be called by all ranks at once, those of every group.

    Args:
        size: bytes to exchange.
    """
    circle = _Circle(group, members, device)
    elements = -(-size // 4 // len(members)) * len(members)
    found = []
    for operation in OPERATIONS[axis]:
        latency, _ = circle.timed(operation, len(members), _LATENCY_TRIES)
        seconds, right = circle.timed(operation, elements, _BANDWIDTH_TRIES)
        found.append(
            Exchange(
                operation=operation,
                members=members,
                bytes=elements * 4,
                seconds=seconds,
                latency_seconds=latency,
                right=right,
            )
        )
    return found


Result = tuple[Tensor, Sequence[float]]
"""What came, and which value each of its equal parts should have throughout."""


@dataclass(frozen=True, slots=True)
class _Circle:
    """The ranks that exchange. `values` are what they give, in order."""

    group: ProcessGroup
    members: tuple[int, ...]
    device: torch.device

    @property
    def place(self) -> int:
        return self.members.index(dist.get_rank())

    def timed(self, operation: str, elements: int, tries: int) -> tuple[float, bool]:
        """Median seconds, and whether all results were right."""
        act: Callable[[list[float], int], Result] = getattr(self, operation)
        spent, right = [], True
        for number in range(_WARM_UP + tries):
            # Others in every try, so that what an earlier one left is not taken for a result.
            values = [float((number + rank) % 8 + 1) for rank in range(len(self.members))]
            dist.barrier(self.group)
            begun = time.perf_counter()
            out, expected = act(values, elements)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            spent.append(time.perf_counter() - begun)
            right = right and all(
                bool((part == value).all())
                for part, value in zip(out.chunk(len(expected)), expected, strict=True)
            )
        return statistics.median(spent[_WARM_UP:]), right

    def all_reduce(self, values: list[float], elements: int) -> Result:
        out = self._filled(values, elements)
        dist.all_reduce(out, group=self.group)
        return out, [sum(values)]

    def all_gather(self, values: list[float], elements: int) -> Result:
        part, out = self._filled(values, elements // len(values)), self._empty(elements)
        _all_gather(out, part, group=self.group)
        return out, values

    def reduce_scatter(self, values: list[float], elements: int) -> Result:
        whole, out = self._filled(values, elements), self._empty(elements // len(values))
        _reduce_scatter(out, whole, group=self.group)
        return out, [sum(values)]

    def all_to_all(self, values: list[float], elements: int) -> Result:
        given, out = self._filled(values, elements), self._empty(elements)
        dist.all_to_all_single(out, given, group=self.group)
        return out, values

    def send(self, values: list[float], elements: int) -> Result:
        """Each to the next, all at once, the last to the first."""
        before, after = self.place - 1, (self.place + 1) % len(values)
        given, out = self._filled(values, elements), self._empty(elements)
        both = [
            dist.P2POp(dist.isend, given, self.members[after], self.group),
            dist.P2POp(dist.irecv, out, self.members[before], self.group),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        return out, [values[before]]

    def _filled(self, values: list[float], elements: int) -> Tensor:
        return torch.full((elements,), values[self.place], device=self.device)

    def _empty(self, elements: int) -> Tensor:
        return torch.empty(elements, device=self.device)


def axis_findings(
    axis: str, seen: Sequence[Sequence[Exchange]], hosts: Sequence[str], innermost: Sequence[str]
) -> list[Finding]:
    """What all ranks saw of an axis, a finding for each operation.

    Args:
        seen: for each rank, its exchanges in the order of `OPERATIONS`.
        hosts: for each rank, its machine.
        innermost: axes that should not reach beyond a machine.
    """
    return [
        _finding(axis, [each[index] for each in seen], hosts, axis in innermost)
        for index in range(len(OPERATIONS[axis]))
    ]


def _finding(axis: str, seen: Sequence[Exchange], hosts: Sequence[str], innermost: bool) -> Finding:
    groups: dict[tuple[int, ...], Exchange] = {}
    for each in seen:  # a group is as fast as the slowest of its ranks saw it
        if each.members not in groups or each.seconds > groups[each.members].seconds:
            groups[each.members] = each
    slowest = min(groups.values(), key=lambda each: each.bytes_per_second)
    middle = statistics.median(each.bytes_per_second for each in groups.values())
    wrong = sorted({each.members for each in seen if not each.right})
    verdict, advice = None, ""
    if wrong:
        verdict, advice = "fail", f"wrong results among {_where(wrong[0], hosts)}: do not train"
    elif slowest.bytes_per_second < _FAR_BEHIND * middle:
        advice = f"{_where(slowest.members, hosts)} is far slower than other groups: look there"
    elif innermost and any(len({hosts[rank] for rank in group}) > 1 for group in groups):
        advice = f"{axis} reaches beyond one machine: a smaller degree would be faster"
    size = len(slowest.members)
    many = f", {len(groups)} groups" if len(groups) > 1 else ""
    text = (
        f"{slowest.operation} of {byte_count(slowest.bytes)} among {count_of(size, 'rank')}{many}: "
        f"{byte_count(slowest.bytes_per_second)}/s at least, "
        f"latency {max(each.latency_seconds for each in seen) * 1e6:.0f} us at most"
    )
    return finding(
        axis,
        text,
        advice,
        verdict="fail" if verdict else None,
        operation=slowest.operation,
        bytes=slowest.bytes,
        groups=len(groups),
        slowest_group=list(slowest.members),
        bus_bytes_per_second=slowest.bytes_per_second,
        median_bus_bytes_per_second=middle,
        latency_seconds=max(each.latency_seconds for each in seen),
        right=not wrong,
    )


def _where(members: Sequence[int], hosts: Sequence[str]) -> str:
    there = ", ".join(dict.fromkeys(hosts[rank] for rank in members))
    return f"ranks {' '.join(map(str, members))} ({there})"
