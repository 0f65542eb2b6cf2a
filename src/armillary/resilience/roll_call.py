"""What ranks tell each other while they wait: that they live, who was lost, that one was asked to
stop, that one has come to a standstill.

A collective that breaks tells of a closed connection or of a timeout, not of who is missing. So
every rank leaves a sign of life, once a second, at the store where the ranks first met, from a
thread of its own: a rank that waits in a collective is alive as well. With each sign it looks
whether there is news.
"""

from __future__ import annotations

import contextlib
import re
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
_HEARING_PERIODS = 10
"""After a finding, how long rank 0 waits for ranks that do not say that they have heard of it."""
_ASKERS = 8
"""Ranks that look for signs of life. Were ten thousand to look for ten thousand, the store would be
busy for an hour; the others wait for the finding of these."""
_SLICE_SECONDS = 0.2
"""How soon what this rank has to tell is sent, between two signs of life."""
_ASKED = "armillary/asked"
_NEWS = "armillary/news"
"""There as soon as any of the following is: one look is enough for as long as there is nothing."""
_VERDICT = "armillary/lost"
_HEARD = "armillary/heard"
_STOP = "armillary/stop"
_CALL = "armillary/call"
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
        self.store = store if world_size > 1 else None
        self.rank, self.world_size = rank, world_size
        self.period = period or max(1.0, world_size / _RANKS_PER_SECOND)
        self._heard: list[int] | None = None
        self._hearing = threading.Lock()
        self._stop: str | None = None
        self._told_of_stop = False
        self._call: str | None = None
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="signs-of-life", daemon=True)

    def __enter__(self) -> RollCall:
        if self.store is not None:
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
            self._thread.join(self.period)

    def post_stop(self, name: str) -> None:
        """Tells all ranks, wherever they wait, that this one was asked to stop, by signal `name`.

        Never blocks and takes no lock, so a signal handler may call it; all have heard of it within
        about a period. What was posted first stays.
        """
        self._stop = self._stop or name

    @property
    def stop_posted(self) -> str | None:
        """The signal by which some rank, this one included, was asked to stop; None: none was."""
        return self._stop

    @property
    def call(self) -> str | None:
        """The newest call of the watchdog that this rank has heard (`post_call`)."""
        return self._call

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
            if self.store is None or not _is_of_a_lost_peer(error):
                raise
            lost = self.lost()
            if not lost:
                raise
            raise _gone(lost, error) from error

    def require_all(self) -> None:
        """For work that waits for other ranks: ends it once some rank was found to be lost.

        Raises:
            RunError: ranks are missing.
        """
        if found := self._heard:
            self._let_others_hear(found)
            raise _gone(found, TimeoutError("it leaves no sign of life"))

    def lost(self) -> list[int]:
        """The ranks without a sign of life; rank 0 where the store itself went with it.

        The first rank to ask leaves its finding for the others, who hear of it between two signs of
        life, whatever they wait in. Rank 0 stays until they have: the store goes with it.
        """
        store = self.store
        assert store is not None
        try:
            found = self._heard or _verdict(store) or self._find(store)
            if found:
                self._hear(store, found)
        except Exception:  # whatever a store makes of a host that does not answer
            return self._heard or [0]
        self._let_others_hear(found)
        return found

    def _find(self, store: Store) -> list[int]:
        return self._told(store) if store.add(_ASKED, 1) > _ASKERS else self._look(store)

    def _hear(self, store: Store, found: list[int]) -> None:
        """Remembers a finding, and lets rank 0 know that this one has heard of it."""
        with self._hearing:
            is_news, self._heard = self._heard is None, found
        if is_news:
            store.add(_HEARD, 1)

    def _let_others_hear(self, found: list[int]) -> None:
        """Where the store goes with this rank: waits for those that are left, for a while."""
        if self.store is None or self.rank != 0 or not found:
            return
        left = self.world_size - len(found)
        until = time.monotonic() + _HEARING_PERIODS * self.period
        with contextlib.suppress(Exception):  # a store that is gone has nothing to tell
            while self.store.add(_HEARD, 0) < left and time.monotonic() < until:
                time.sleep(self.period / 10)

    def _look(self, store: Store) -> list[int]:
        before = self._signs(store)
        time.sleep(_SILENT_PERIODS * self.period)
        if (found := _verdict(store)) is not None:
            return found
        after = self._signs(store)
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        found = [rank for rank in others if after[rank] == before[rank]]
        if found:
            post(store, _VERDICT, " ".join(map(str, found)))
        return found

    def _told(self, store: Store) -> list[int]:
        """What those who look have found, when they have had time for it."""
        for _ in range(2 * _SILENT_PERIODS):
            time.sleep(self.period)
            if (found := _verdict(store)) is not None:
                return found
        return []

    def _signs(self, store: Store) -> list[int]:
        return [store.add(_key(rank), 0) for rank in range(self.world_size)]

    def _beat(self) -> None:
        assert self.store is not None
        due = time.monotonic()
        while not self._leaving.is_set():
            try:
                self._tell_of_stop(self.store)
                if time.monotonic() >= due:
                    due = time.monotonic() + self.period
                    self.store.add(_key(self.rank), 1)
                    self._listen(self.store)
            except Exception:  # the store is gone: a collective will tell
                return
            self._leaving.wait(min(_SLICE_SECONDS, self.period))

    def _tell_of_stop(self, store: Store) -> None:
        if self._stop is not None and not self._told_of_stop:
            self._told_of_stop = True
            if read(store, _STOP) is None:
                post(store, _STOP, self._stop)

    def _listen(self, store: Store) -> None:
        if not store.check([_NEWS]):
            return
        if (found := _verdict(store)) is not None:
            self._hear(store, found)
        self._call = read(store, _CALL)
        if self._stop is None and (name := read(store, _STOP)) is not None:
            self._stop, self._told_of_stop = name, True


def post(store: Store, key: str, text: str) -> None:
    """Leaves something that every rank is to hear of with its next sign of life."""
    store.set(key, text)
    store.set(_NEWS, "")


def post_call(store: Store, text: str) -> None:
    """Leaves a call for `RollCall.call` of every rank; it takes the place of the one before."""
    post(store, _CALL, text)


def read(store: Store, key: str) -> str | None:
    """What was left under a key; None: nothing so far. Does not wait for it."""
    return store.get(key).decode() if store.check([key]) else None


def _verdict(store: Store) -> list[int] | None:
    """What a rank has found; None: nothing so far."""
    found = read(store, _VERDICT)
    return None if found is None else [int(rank) for rank in found.split()]


def _key(rank: int) -> str:
    return f"armillary/alive/{rank}"


def _is_of_a_lost_peer(error: BaseException) -> bool:
    text = f"{type(error).__name__}: {error}".lower()
    return any(words in text for words in _LOST_PEER)


def _gone(ranks: list[int], error: BaseException) -> RunError:
    names = ", ".join(map(str, ranks))
    who = f"rank {names} is gone" if len(ranks) == 1 else f"ranks {names} are gone"
    words = str(error).strip().splitlines() or [type(error).__name__]
    # gloo says where in its source, and what it makes of it; the middle is what happened.
    what = re.sub(r"^\[[^]]*:\d+\] ", "", words[0]).partition(". ")[0]
    return RunError(
        Problem(
            f"{who}, so no step can be finished: {what}",
            fix="look into its log for the reason; the same command goes on from the newest"
            " checkpoint",
        )
    )
