"""Agreement between ranks: what one fails at, all report. One rank is a mesh too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch.distributed as dist

from armillary.foundation.errors import ArmillaryError, Problem, UserError

T = TypeVar("T")

# A rank may hash or write for long while the others wait; a dead peer is noticed at once anyway.
_TIMEOUT = timedelta(hours=6)


class Failure(Exception):
    """What went wrong on some rank, in words."""


@dataclass(frozen=True, slots=True)
class _Raised:
    """An exception on its way to other ranks; exceptions themselves need not survive pickling."""

    words: str
    problems: list[Problem] | None = None


class Ranks:
    """The ranks that share a checkpoint, over a gloo group of their own."""

    def __init__(self) -> None:
        self.distributed = dist.is_available() and dist.is_initialized()
        self.group = dist.new_group(backend="gloo", timeout=_TIMEOUT) if self.distributed else None
        self.rank = dist.get_rank() if self.distributed else 0
        self.size = dist.get_world_size() if self.distributed else 1

    def together(self, work: Callable[[], T]) -> list[T]:
        """Runs `work` on each rank; returns everyone's result, or fails everywhere.

        Raises:
            Failure: on every rank, if any rank failed.
        """
        own = _attempt(work)
        results: list[T | _Raised] = [own]
        if self.distributed:
            results = [own] * self.size
            dist.all_gather_object(results, own, group=self.group)
        failed = {rank: r for rank, r in enumerate(results) if isinstance(r, _Raised)}
        if failed:
            where = "; ".join(
                f"rank {rank}: {raised.words}" if self.size > 1 else raised.words
                for rank, raised in failed.items()
            )
            raise Failure(where)
        return cast(list[T], results)

    def on_main(self, work: Callable[[], T]) -> T:
        """Runs `work` on rank 0 only; returns its result, or fails, everywhere.

        Raises:
            Failure: rank 0 failed.
            UserError: rank 0 raised one.
        """
        box: list[T | _Raised | None] = [_attempt(work) if self.rank == 0 else None]
        if self.distributed:
            dist.broadcast_object_list(box, src=0, group=self.group)
        result = box[0]
        if isinstance(result, _Raised):
            raise UserError(result.problems) if result.problems else Failure(result.words)
        return cast(T, result)

    def close(self) -> None:
        """Gives the group back."""
        if self.distributed and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.distributed, self.group = False, None


def _attempt(work: Callable[[], T]) -> T | _Raised:
    try:
        return work()
    except ArmillaryError as error:
        return _Raised(str(error), error.problems)
    except Exception as error:
        return _Raised(describe(error))


def describe(error: BaseException) -> str:
    """An exception in one line."""
    return str(error) if isinstance(error, Failure) else f"{type(error).__name__}: {error}"
