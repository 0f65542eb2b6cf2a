"""Agreement between ranks: what one fails at, all report. One rank is a mesh too."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.foundation.errors import ArmillaryError, Stopped

T = TypeVar("T")

# A rank may write, read or build for days while the others wait: a large corpus, for one. A peer
# that dies closes its connection, which is noticed at once, and one whose host vanished, or that
# stands still, is for `on_wait` and the watchdog to notice.
_TIMEOUT = timedelta(days=30)
_GLANCE = timedelta(seconds=1)


class Failure(Exception):
    """What went wrong on some rank, in words; the exception itself is its cause, on that rank."""


@dataclass(frozen=True, slots=True)
class _Raised:
    """An exception on its way to other ranks."""

    words: str
    error: ArmillaryError | Stopped | None
    """Itself, if it is of a kind that travels."""


class Ranks:
    """All ranks of a run, over a gloo group of their own; every rank makes one together.

    A group is one thread's: who agrees in a thread of its own makes ranks of its own.

    What `work` raises is raised on every rank, so that none waits for one that has left: errors
    meant for people and requests to stop as they are (the first rank's, of several), anything else
    as `Failure`.

    Args:
        on_wait: called about once a second while this rank waits for others, in its thread. What it
            raises ends the wait, on this rank alone: it is for telling that a peer is gone.
    """

    def __init__(self, on_wait: Callable[[], object] = lambda: None) -> None:
        self._on_wait = on_wait
        self.distributed = dist.is_available() and dist.is_initialized()
        self.group = dist.new_group(backend="gloo", timeout=_TIMEOUT) if self.distributed else None
        self.rank = dist.get_rank() if self.distributed else 0
        self.size = dist.get_world_size() if self.distributed else 1

    def together(self, work: Callable[[], T]) -> list[T]:
        """Runs `work` on each rank; returns everyone's result, or fails everywhere.

        Raises:
            Failure: on every rank, if any rank failed.
        """
        own, cause = _attempt(work)
        results = [own]
        if self.distributed:
            results = self._gather(own)
        failed = {rank: r for rank, r in enumerate(results) if isinstance(r, _Raised)}
        if failed:
            raise _told(failed, name_ranks=self.size > 1) from cause
        return cast(list[T], results)

    def on_main(self, work: Callable[[], T]) -> T:
        """Runs `work` on rank 0 only; returns its result, or fails, everywhere.

        Raises:
            Failure: rank 0 failed.
        """
        own, cause = _attempt(work) if self.rank == 0 else (None, None)
        result = self._from_main(own) if self.distributed else own
        if isinstance(result, _Raised):
            raise _told({0: result}, name_ranks=False) from cause
        return cast(T, result)

    def main_first(self, work: Callable[[], T]) -> T:
        """Runs `work` on every rank, on rank 0 before the others, which then find its result done.

        Raises:
            Failure: on every rank, if any rank failed.
        """
        mine: list[T] = []

        def once() -> None:  # results stay where they were made: they need not survive pickling
            if not mine:
                mine.append(work())

        self.on_main(once)
        self.together(once)
        return mine[0]

    def sum_and_any(self, number: int, flag: bool) -> tuple[int, bool]:
        """See `sums_and_any`, for one number."""
        (total,), any_flag = self.sums_and_any((number,), flag)
        return total, any_flag

    def sums_and_any(self, numbers: Sequence[int], flag: bool) -> tuple[tuple[int, ...], bool]:
        """The sums of numbers over all ranks, and whether any rank set its flag.

        One small collective between hosts, so no device is waited for. It is part of every step,
        and over the run's group therefore: a rank that hangs is noticed as soon as in the others.
        """
        if not self.distributed:
            return tuple(numbers), flag
        both = torch.tensor([*numbers, int(flag)], dtype=torch.int64)
        dist.all_reduce(both)
        *totals, flags = both.tolist()
        return tuple(totals), bool(flags)

    def _gather(self, own: T) -> list[T]:
        """What each rank has, on all of them."""
        mine = _as_bytes(own)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        size = torch.tensor([len(mine)])
        self._finish(dist.all_gather(sizes, size, group=self.group, async_op=True))
        longest = max(int(each) for each in sizes)
        padded = torch.cat([mine, torch.zeros(longest - len(mine), dtype=torch.uint8)])
        blocks = [torch.empty_like(padded) for _ in range(self.size)]
        self._finish(dist.all_gather(blocks, padded, group=self.group, async_op=True))
        return [_from_bytes(block[: int(size)]) for block, size in zip(blocks, sizes, strict=True)]

    def _from_main(self, own: T) -> T:
        """What rank 0 has, on all of them."""
        data = _as_bytes(own)
        size = torch.tensor([len(data)])
        self._finish(dist.broadcast(size, src=0, group=self.group, async_op=True))
        if self.rank != 0:
            data = torch.empty(int(size), dtype=torch.uint8)
        self._finish(dist.broadcast(data, src=0, group=self.group, async_op=True))
        return cast(T, _from_bytes(data))

    def _finish(self, work: Any) -> None:
        """Waits for a collective, a second at a time.

        Gloo says in the same words that its own time is over and that a glance was; the former
        comes at once, when the work has ended.
        """
        while True:
            began = time.monotonic()
            try:
                work.wait(timeout=_GLANCE)
                return
            except RuntimeError:
                if work.is_completed() or time.monotonic() - began < _GLANCE.total_seconds() / 2:
                    raise
            self._on_wait()

    def close(self) -> None:
        """Gives the group back."""
        if self.distributed and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.distributed, self.group = False, None


def _as_bytes(value: object) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _from_bytes(data: Tensor) -> Any:
    """Of our own ranks only, over the run's own connections."""
    return pickle.loads(data.numpy().tobytes())


def _attempt(work: Callable[[], T]) -> tuple[T | _Raised, Exception | None]:
    """The result, or what was raised and, where only its words travel, its cause."""
    try:
        return work(), None
    except (ArmillaryError, Stopped) as error:
        return _Raised(str(error), error), None
    except Exception as error:
        return _Raised(describe(error), None), error


def _told(failed: Mapping[int, _Raised], *, name_ranks: bool) -> Exception:
    """What all ranks raise."""
    for raised in failed.values():
        if raised.error is not None:
            if isinstance(raised.error, ArmillaryError):
                raised.error.seen_by_every_rank = True
            return raised.error
    words = (f"rank {rank}: {r.words}" if name_ranks else r.words for rank, r in failed.items())
    return Failure("; ".join(words))


def describe(error: BaseException) -> str:
    """An exception in one line."""
    return str(error) if isinstance(error, Failure) else f"{type(error).__name__}: {error}"
