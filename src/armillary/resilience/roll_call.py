"""Says which ranks were lost when a collective fails.

A collective that breaks tells of a closed connection or of a timeout, not of who is missing. So
every rank leaves a sign of life, once a second, at the store where the ranks first met, from a
thread of its own: a rank that waits in a collective is alive as well.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Protocol

from armillary.foundation.errors import ArmillaryError, Problem, RunError

_RANKS_PER_SECOND = 500
"""Signs of life that the store takes without strain."""
_SILENT_PERIODS = 4
"""Without a sign of life for so long, a rank is lost."""
_HEARING_PERIODS = 3
"""After a finding, how long it takes until every rank has looked at the store once more."""
_ASKERS = 8
"""Ranks that look for signs of life. Were ten thousand to look for ten thousand, the store would be
busy for an hour; the others wait for the finding of these."""
_ASKED = "armillary/asked"
_VERDICT = "armillary/lost"
_LOST_PEER = (
    "closed by peer",
    "reset by peer",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "application timeout",
    "socket timeout",
    "nccl",
)
"""Words of errors that come from a peer and not from this rank's own work."""


class Store(Protocol):
    """Where the ranks met; `torch.distributed.Store` is one."""

    def add(self, key: str, amount: int, /) -> int:
        """Counts up and tells the count."""

    def set(self, key: str, value: str, /) -> None:
        """Leaves a value for others."""

    def get(self, key: str, /) -> bytes:
        """What was left."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all of these values are there."""


class RollCall:
    """Signs of life of this rank, and the question who has none. Nothing to do for one rank.

    Args:
        store: where the ranks met; None: nobody can be asked.
        rank: this one.
        world_size: how many there are.
        period: seconds between two signs of life; None: one, or longer where there are many ranks.
    """

    def __init__(
        self, store: Store | None, *, rank: int, world_size: int, period: float | None = None
    ) -> None:
        self._store = store if world_size > 1 else None
        self._rank, self._world_size = rank, world_size
        self._period = period or max(1.0, world_size / _RANKS_PER_SECOND)
        self._heard: list[int] | None = None
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="signs-of-life", daemon=True)

    def __enter__(self) -> RollCall:
        if self._store is not None:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leaving.set()
        if self._thread.is_alive():
            self._thread.join(self._period)

    @contextlib.contextmanager
    def naming_the_lost(self) -> Iterator[None]:
        """Around work of all ranks: what follows from a lost rank becomes an error that names it.

        Any other error passes as it is.

        Raises:
            RunError: ranks are missing.
        """
        try:
            yield
        except ArmillaryError:
            raise
        except Exception as error:
            if self._store is None or not _is_of_a_lost_peer(error):
                raise
            lost = self.lost()
            if not lost:
                raise
            raise _gone(lost, error) from error

    def lost(self) -> list[int]:
        """The ranks without a sign of life; rank 0 where the store itself went with it.

        The first rank to ask leaves its finding for the others, who hear of it between two signs of
        life, whatever they wait in: it may be gone itself, and the store with it, before they come
        to ask. So it also stays for as long as they need to hear.
        """
        store = self._store
        assert store is not None
        try:
            if (found := self._heard or _verdict(store)) is not None:
                return found
            if store.add(_ASKED, 1) > _ASKERS:
                return self._told(store)
            return self._look(store)
        except Exception:  # whatever a store makes of a host that does not answer
            return self._heard or [0]

    def _look(self, store: Store) -> list[int]:
        before = self._signs(store)
        time.sleep(_SILENT_PERIODS * self._period)
        if (found := _verdict(store)) is not None:
            return found
        after = self._signs(store)
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        found = [rank for rank in others if after[rank] == before[rank]]
        if found:
            store.set(_VERDICT, " ".join(map(str, found)))
            time.sleep(_HEARING_PERIODS * self._period)
        return found

    def _told(self, store: Store) -> list[int]:
        """What those who look have found, when they have had time for it."""
        for _ in range(2 * _SILENT_PERIODS):
            time.sleep(self._period)
            if (found := _verdict(store)) is not None:
                return found
        return []

    def _signs(self, store: Store) -> list[int]:
        return [store.add(_key(rank), 0) for rank in range(self._world_size)]

    def _beat(self) -> None:
        assert self._store is not None
        while not self._leaving.is_set():
            try:
                self._store.add(_key(self._rank), 1)
                self._heard = _verdict(self._store)
            except Exception:  # the store is gone: a collective will tell
                return
            self._leaving.wait(self._period)


def _verdict(store: Store) -> list[int] | None:
    """What a rank has found; None: nothing so far."""
    if not store.check([_VERDICT]):
        return None
    return [int(rank) for rank in store.get(_VERDICT).decode().split()]


def _key(rank: int) -> str:
    return f"armillary/alive/{rank}"


def _is_of_a_lost_peer(error: BaseException) -> bool:
    text = f"{type(error).__name__}: {error}".lower()
    return any(words in text for words in _LOST_PEER)


def _gone(ranks: list[int], error: BaseException) -> RunError:
    names = ", ".join(map(str, ranks))
    who = f"rank {names} is gone" if len(ranks) == 1 else f"ranks {names} are gone"
    words = str(error).strip().splitlines() or [type(error).__name__]
    return RunError(
        Problem(
            f"{who}, so no step can be finished: {words[0]}",
            fix="look into its log for the reason; the same command goes on from the newest"
            " checkpoint",
        )
    )
