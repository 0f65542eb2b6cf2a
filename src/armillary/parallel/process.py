"""This process among the ranks. Every function also works without a process group."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from armillary.foundation.errors import Problem, UserError

T = TypeVar("T")

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


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
    available = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available() and world_size() == 1,
    }
    if not available.get(kind, False):
        raise UserError(
            Problem(
                f"parallel.device = {kind} is not available to {world_size()} rank(s) here",
                allowed=", ".join(name for name, there in available.items() if there),
                fix="--parallel.device auto",
            )
        )
    if kind != "cuda":
        return torch.device(kind)
    if local_rank() >= torch.cuda.device_count():
        raise UserError(
            Problem(
                f"rank {rank()} has no GPU: this machine has {torch.cuda.device_count()}",
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
    dist.init_process_group(
        BACKENDS[device.type],
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if device.type == "cuda" else None,
    )
    return True


def destroy() -> None:
    """Leaves the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def barrier() -> None:
    """Waits until every rank is here."""
    if dist.is_initialized():
        # A reduction on the host: dist.barrier would use the accelerator and warn about it.
        dist.all_reduce(torch.zeros(1))


def broadcast_object(value: T, source: int = 0) -> T:
    """The value of rank `source`, on every rank."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=source, device=torch.device("cpu"))
    return box[0]


def gather_objects(value: T) -> list[T]:
    """The values of all ranks, in order of rank, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank: one byte between hosts, no accelerator involved."""
    if not dist.is_initialized():
        return flag
    flags = torch.tensor([flag], dtype=torch.uint8)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags.item())
