"""What a rank sends: every collective that runs, counted in calls and bytes by axis of the mesh.

    with Ledger(mesh) as ledger:
        step()
    ledger.by_axis()  # {"fsdp": Traffic(calls=9, sent_bytes=81920), "tp": ...}

Operators are seen as torch dispatches them, so it does not matter who calls: FSDP, a pipeline, the
operators of `parallel.collectives`, an optimizer. Bytes are those that the collective makes this
rank send at the least, n being the bytes of this rank's input and R the ranks of the group:

    all-gather        (R - 1) n         its part to each other rank
    reduce-scatter    (R - 1) n / R     to each other rank what that one sums
    all-reduce        2 (R - 1) n / R   the two above, one after the other
    all-to-all        n without the part that stays here
    broadcast, scatter (from the root), gather, reduce (to the root): what leaves the rank
    send              n;  receive and barrier: nothing

(Chan et al. 2007, "Collective communication: theory, practice, and experience", table 1: the lower
bounds on bandwidth.) A backend may move more: gloo reduces and scatters by way of all-reduce.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from armillary.parallel import dispatched
from armillary.parallel.grid import AXES, DENSE_AXES
from armillary.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one rank did on one axis."""

    calls: int = 0
    """Collectives it took part in."""
    sent_bytes: int = 0
    """Bytes it sent, see the module."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.sent_bytes + other.sent_bytes)


Entry = tuple[str, str]
"""(axis, operation)."""


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Counts, while it is entered, what this rank sends. To be entered on the ranks of interest.

    The axes of one mesh may have the same ranks, and then share a group: on two ranks, `fsdp` and
    `ep`. What is sent over it is booked by who uses it: uneven all-to-alls are `ep`'s, operators of
    `parallel.collectives` those of the axes that cut modules, point to point that of the pipeline,
    flat all-gathers and reduce-scatters FSDP's, and the rest (sums) that of the axes that cut data.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mesh = mesh
        self._axes = _axes_by_group(mesh)
        self._calls: Counter[Entry] = Counter()
        self._bytes: Counter[Entry] = Counter()
        self._outer = ""
        """The operator of ours that is running."""

    def entries(self) -> dict[Entry, Traffic]:
        """Traffic by (axis, operation), in order of name."""
        return {key: Traffic(self._calls[key], self._bytes[key]) for key in sorted(self._calls)}

    def by_axis(self) -> dict[str, Traffic]:
        """Traffic by axis; axes without any do not appear."""
        totals: dict[str, Traffic] = {}
        for (axis, _), traffic in self.entries().items():
            totals[axis] = totals.get(axis, Traffic()) + traffic
        return totals

    def take(self) -> dict[Entry, Traffic]:
        """The entries so far, and a new page: call it after each step."""
        entries = self.entries()
        self._calls.clear()
        self._bytes.clear()
        return entries

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Books a collective, looks into operators of ours, lets all else pass."""
        kwargs = kwargs or {}
        if func.namespace == "armillary":
            return self._look_into(func, args, kwargs)
        if func.namespace in _NAMESPACES:
            self._book(func, dispatched.arguments(func, args, kwargs))
        return func(*args, **kwargs)

    def _look_into(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        outer = self._outer
        self._outer = outer or dispatched.name(func)
        try:
            with self:
                return dispatched.call_kernel(func, args, kwargs)
        finally:
            self._outer = outer

    def _book(self, func: Any, arguments: dict[str, Any]) -> None:
        operator = dispatched.name(func).partition("::")[2].rstrip("_")
        if operator not in _OPERATORS:
            return
        operation, source = _OPERATORS[operator]
        group = dispatched.group_of(arguments)
        entry = (self._axis(group, operator), operation)
        self._calls[entry] += 1
        self._bytes[entry] += sent_bytes(operation, source, arguments, group.size(), group.rank())

    def _axis(self, group: dist.ProcessGroup, operator: str) -> str:
        axes = self._axes.get(str(group.group_name))
        if axes is None:
            return _described(self._mesh, dist.get_process_group_ranks(group))
        return min(axes, key=_preference(operator, self._outer).index)


def _preference(operator: str, outer: str) -> tuple[str, ...]:
    """Whose a collective on a group is, of the axes that the group may stand for."""
    operation = _OPERATORS[operator][0]
    data = ("fsdp", "dp_replicate", "dp_shard")
    modules = ("tp", "cp", "expert_tp")
    if outer.endswith("::all_to_all_uneven") or (operation == "all-to-all" and not outer):
        return ("ep", *modules, *data, "expert_fsdp", "pp")
    if outer:
        return (*modules, "ep", "pp", *data, "expert_fsdp")
    if operation in ("send", "receive"):
        return ("pp", *modules, *data, "expert_fsdp", "ep")
    if operator in ("_allgather_base", "_reduce_scatter_base"):
        return (*data, "expert_fsdp", *modules, "pp", "ep")
    return (*data, *modules, "expert_fsdp", "pp", "ep")


def _axes_by_group(mesh: Mesh) -> dict[str, list[str]]:
    """Names of the mesh's groups, and the axes that each is the group of."""
    found: dict[str, list[str]] = {}
    for axis in AXES:
        if (group := mesh.group(axis)) is not None:
            found.setdefault(str(group.group_name), []).append(axis)
    return found


def _described(mesh: Mesh, ranks: Sequence[int]) -> str:
    """A group that is of no axis, by the axes along which its ranks differ."""
    differing = [
        axis for axis in DENSE_AXES if len({mesh.grid.coordinate(rank, axis) for rank in ranks}) > 1
    ]
    return "+".join(differing) or "none"


_NAMESPACES = ("c10d", "_c10d_functional")
_OPERATORS: dict[str, tuple[str, str]] = {
    "_allgather_base": ("all-gather", "input_tensor"),
    "allgather": ("all-gather", "input_tensors"),
    "allgather_coalesced": ("all-gather", "input_list"),
    "allgather_into_tensor_coalesced": ("all-gather", "inputs"),
    "all_gather_into_tensor": ("all-gather", "input"),
    "all_gather_into_tensor_out": ("all-gather", "input"),
    "all_gather_into_tensor_coalesced": ("all-gather", "inputs"),
    "_reduce_scatter_base": ("reduce-scatter", "input_tensor"),
    "reduce_scatter": ("reduce-scatter", "input_tensors"),
    "reduce_scatter_tensor": ("reduce-scatter", "input"),
    "reduce_scatter_tensor_out": ("reduce-scatter", "input"),
    "reduce_scatter_tensor_coalesced": ("reduce-scatter", "inputs"),
    "allreduce": ("all-reduce", "tensors"),
    "allreduce_coalesced": ("all-reduce", "tensors"),
    "all_reduce": ("all-reduce", "input"),
    "all_reduce_coalesced": ("all-reduce", "inputs"),
    "alltoall": ("all-to-all", "input_tensors"),
    "alltoall_base": ("all-to-all", "input"),
    "all_to_all_single": ("all-to-all", "input"),
    "broadcast": ("broadcast", "tensors"),
    "scatter": ("scatter", "input_tensors"),
    "gather": ("gather", "input_tensors"),
    "reduce": ("reduce", "tensors"),
    "send": ("send", "tensors"),
    "recv": ("receive", ""),
    "recv_any_source": ("receive", ""),
    "barrier": ("barrier", ""),
    "monitored_barrier": ("barrier", ""),
}
"""Operators of torch by name, without the underscore of those in place: what they do, and which
argument holds this rank's input."""


def sent_bytes(
    operation: str, source: str, arguments: Mapping[str, Any], ranks: int, rank: int
) -> int:
    """Bytes that `rank` of a group of `ranks` sends at the least, see the module; rounded up."""
    size = _bytes(arguments.get(source))
    others = ranks - 1
    if operation == "all-to-all":
        return size - _kept(arguments, source, size, ranks, rank)
    if operation in ("broadcast", "scatter", "gather", "reduce"):
        root = arguments.get("root_rank", arguments.get("src"))
        from_root = operation in ("broadcast", "scatter")
        if (rank == root) != from_root:
            return 0
        return {"broadcast": size * others, "scatter": size * others // ranks}.get(operation, size)
    parts = {
        "all-gather": size * others * ranks,
        "reduce-scatter": size * others,
        "all-reduce": 2 * size * others,
        "send": size * ranks,
    }
    return -(-parts.get(operation, 0) // ranks)


def _kept(arguments: Mapping[str, Any], source: str, size: int, ranks: int, rank: int) -> int:
    """Bytes of an all-to-all's input that stay where they are."""
    tensors = arguments[source]
    if isinstance(tensors, (list, tuple)):
        return _bytes(tensors[rank])
    splits: Sequence[int] | None = arguments.get("input_split_sizes")
    if not splits:
        return size // ranks
    return size * splits[rank] // max(sum(splits), 1)


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(_bytes(part) for part in value)
    return 0
