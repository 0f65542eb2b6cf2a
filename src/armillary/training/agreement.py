"""Work that one rank does for all: either every rank goes on, or every rank stops the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from armillary.foundation.errors import ArmillaryError
from armillary.parallel import process
from armillary.resilience.signals import Stopped

T = TypeVar("T")


def on_main(work: Callable[[], T]) -> T:
    """Runs `work` on rank 0 and returns its result on every rank.

    An error meant for people, or a stop that was asked for, is raised on every rank, so that none
    waits for one that has left. Anything else ends rank 0, and the launcher ends the others.
    """
    result: T | None = None
    error: ArmillaryError | Stopped | None = None
    if process.is_main():
        try:
            result = work()
        except (ArmillaryError, Stopped) as caught:
            error = caught
    outcome = process.broadcast_object((result, error))
    if outcome[1] is not None:
        raise outcome[1]
    return cast(T, outcome[0])


def on_main_first(work: Callable[[], T]) -> T:
    """Runs `work` on every rank, on rank 0 before the others, which then find its result done."""
    mine: list[T] = []
    on_main(lambda: mine.append(work()))
    return mine[0] if mine else work()


def sum_and_any(number: int, flag: bool) -> tuple[int, bool]:
    """The sum of a number over all ranks, and whether any rank set its flag: one small collective.

    Between hosts, not devices: both are host values, so no device is waited for.
    """
    if not dist.is_initialized():
        return number, flag
    both = torch.tensor([number, int(flag)], dtype=torch.int64)
    dist.all_reduce(both)
    return int(both[0]), bool(both[1])
