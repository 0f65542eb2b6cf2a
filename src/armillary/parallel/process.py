"""This process among the ranks. Every function also works without a process group."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from armillary.foundation.errors import Problem, UserError
from armillary.parallel import agent_store, flight_recorder, meeting

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


@dataclass
class _Joined:
    """What this process agreed to when it joined its group."""

    timeout: timedelta | None = None
    store: Any = None  # a torch.distributed.Store, which torch's stubs do not export


_joined = _Joined()


def rank() -> int:
    """Number of this process, counted from 0 over the whole run."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """How many processes the run has."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Number of this process on its machine, counted from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """How many of the run's processes share this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size())))


def is_main() -> bool:
    """Whether this is the one rank that speaks."""
    return rank() == 0


def choose_device(kind: str = "auto") -> torch.device:
    """The device of this rank: cuda where there is one, else cpu, unless `kind` names another.

    Raises:
        UserError: the kind is not there, or has fewer devices than this machine has ranks.
    """
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    available = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    if kind not in available:
        raise UserError(
            Problem(
                f"parallel.device = {kind} is not available here",
                allowed=", ".join(available),
                fix="--parallel.device auto",
            )
        )
    if kind != "cuda":
        return torch.device(kind)
    if local_world_size() > torch.cuda.device_count():  # the same answer on each rank here
        raise UserError(
            Problem(
                f"{local_world_size()} ranks here, but this machine has"
                f" {torch.cuda.device_count()} GPU(s)",
                allowed="one rank per GPU",
                fix=f"--nproc {torch.cuda.device_count()}",
            )
        )
    return torch.device("cuda", local_rank())


def init_process_group(device: torch.device, timeout_seconds: float = 600.0) -> bool:
    """Joins the group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe.

    Does nothing without those variables (one process), and nothing when a group is there already.
    A collective that waits longer than the timeout fails instead of hanging. Returns whether a
    group was made, and so whether the caller has one to `destroy`.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized() or world_size() == 1:
        return False
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UserError(
            Problem(
                f"WORLD_SIZE = {world_size()}, but {', '.join(missing)} is not set",
                allowed="all of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, or none",
                fix=f"armillary train --nproc {world_size()}, or torchrun",
            )
        )
    flight_recorder.enable()
    _joined.timeout = timedelta(seconds=timeout_seconds)
    # A connection of our own to where the ranks met: the group's may be in use, waiting.
    _joined.store, store = _meet(rank(), world_size(), _joined.timeout)
    dist.init_process_group(
        BACKENDS[device.type],
        timeout=_joined.timeout,
        device_id=device if device.type == "cuda" else None,
        store=store,
        rank=rank(),
        world_size=world_size(),
    )
    return True


def _meet(rank: int, world_size: int, timeout: timedelta) -> tuple[Any, Any]:
    """Two connections to the store at which the ranks find each other."""
    if meeting.is_ours():
        return meeting.meet(rank, world_size, timeout)
    if agent_store.is_shared():
        return agent_store.meet(rank, world_size, timeout)
    first, second = (next(iter(rendezvous("env://", timeout=timeout)))[0] for _ in range(2))
    return first, second


def timeout() -> timedelta | None:
    """How long a collective of this process may wait; None: as long as torch lets it."""
    return _joined.timeout


def store() -> Any:
    """Where the ranks met, which outlives a broken collective; None: this process did not join."""
    return _joined.store


def gather(row: list[float]) -> list[list[float]]:
    """Everyone's row, in order of rank; all rows are equally long. On rank 0 only; else empty."""
    if not dist.is_initialized():
        return [row]
    own = torch.tensor(row, dtype=torch.float64)
    rows = [torch.empty_like(own) for _ in range(world_size())] if is_main() else None
    dist.gather(own, rows, dst=0)
    return [each.tolist() for each in rows or []]


def destroy() -> None:
    """Leaves the process group and all groups below it, if there is one."""
    from armillary.parallel import groups  # it knows this module

    groups.forget()
    _joined.timeout, _joined.store = None, None
    if dist.is_initialized():
        dist.destroy_process_group()
