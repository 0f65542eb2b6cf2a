"""A polite stop: signals set a flag, the run ends itself with its state saved. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, Protocol

from armillary.foundation.errors import EXIT_INTERRUPTED, EXIT_RUN_ME_AGAIN, Stopped
from armillary.foundation.tell import tell

__all__ = ["STOP_SIGNALS", "StopRequest", "Stopped", "heeded_signals", "ignore_stop_signals"]

STOP_SIGNALS = tuple(
    signal.Signals[name]
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")
    if hasattr(signal, name)
)
_TERMINAL_IS_LOST = "SIGHUP"
# A launcher and the terminal each pass on one Ctrl-C, so one press may arrive here twice.
_SAME_PRESS_SECONDS = 1.0
_LOOK_SECONDS = 0.5
"""How often a process that may leave by itself looks whether a peer was asked to stop."""
_STDERR = 2
_LOOK_AT_YOUR_WATCH = b"\0"  # to the listener; no signal has this number


def heeded_signals() -> list[signal.Signals]:
    """Those that ask this process to stop.

    The loss of its terminal does not where that is ignored already, as `nohup` has it.
    """
    return [
        each
        for each in STOP_SIGNALS
        if each.name != _TERMINAL_IS_LOST or signal.getsignal(each) != signal.SIG_IGN
    ]


class Peers(Protocol):
    """The other ranks; `roll_call.RollCall` is one."""

    def post_stop(self, name: str) -> None:
        """Tells them that this rank was asked to stop, by signal `name`."""

    @property
    def stop_posted(self) -> str | None:
        """The signal that some rank told of."""


class StopRequest:
    """Turns `heeded_signals` into a flag, while entered; main thread only.

        with StopRequest() as stop:
            for document in corpus:
                stop.check()          # raises Stopped
                ...

    A thread hears the signals at once, whatever the main thread waits in: Python's own handlers run
    only between two of its instructions, so not while a collective waits for another rank.

    A second SIGINT, a second or more after the first, leaves at once with exit code 130. Published
    checkpoints are whole at any moment, so that costs at most the one being written.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self._clock = clock
        self._leave = leave
        self._own: str | None = None
        self._asked_at: float | None = None
        self.interrupts = 0
        """How often Ctrl-C was heard."""
        self._interrupted_at: float | None = None
        self._peers: Peers | None = None
        self._patience: float | None = None
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1
        self._ours: socket.socket | None = None
        self._theirs: socket.socket | None = None

    @property
    def signal_name(self) -> str | None:
        """The signal that asked first, e.g. `SIGTERM`, here or, once shared, on another rank."""
        return self._own or (self._peers.stop_posted if self._peers is not None else None)

    @property
    def requested(self) -> bool:
        """Whether a stop was asked for. Other ranks may not know; agree first."""
        return self.signal_name is not None

    @property
    def seconds(self) -> float | None:
        """Since this process got its first signal; None: it got none."""
        return None if self._asked_at is None else self._clock() - self._asked_at

    def check(self) -> None:
        """For long phases that can end between two pieces of work.

        Raises:
            Stopped: a stop was requested.
        """
        if (name := self.signal_name) is not None:
            raise Stopped(name)

    def share(self, peers: Peers) -> None:
        """From now on a stop that any rank is asked for is told to all, wherever they wait."""
        self._peers = peers
        if self._own is not None:
            peers.post_stop(self._own)

    @contextlib.contextmanager
    def leaving_after(self, seconds: float) -> Iterator[None]:
        """Around work that may never end and has nothing to save, as waiting for other ranks.

        When it goes on for so long after a request to stop, the process ends with exit code 75.
        """
        assert self._theirs is not None, "not entered"
        self._patience = seconds
        self._theirs.send(_LOOK_AT_YOUR_WATCH)
        try:
            yield
        finally:
            self._patience = None

    def __enter__(self) -> StopRequest:
        self._ours, self._theirs = ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        _listened_to.add(theirs.fileno())
        self._thread = threading.Thread(
            target=self._listen, args=(ours,), name="signals", daemon=True
        )
        self._thread.start()
        for number in heeded_signals():
            self._before[number] = signal.signal(number, self._receive)
        if hasattr(signal, "pthread_sigmask"):  # a launcher blocks them until somebody listens
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            # None: it was installed by something other than python, and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()
        signal.set_wakeup_fd(self._wakeup_before)
        assert self._ours is not None and self._theirs is not None
        _listened_to.discard(self._theirs.fileno())
        self._theirs.close()  # the listener ends
        self._thread.join()
        self._ours.close()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, before its next instruction: whoever asks now must see it."""
        self._note(number)

    def _note(self, number: int) -> None:
        if self._own is None:
            self._asked_at = self._clock()
            self._own = signal.Signals(number).name
            if self._peers is not None:
                self._peers.post_stop(self._own)

    def _listen(self, ours: socket.socket) -> None:
        """In a thread of its own: the signals as they come, and the end of patience."""
        waited = 0.0
        while True:
            patience = self._patience
            if select.select([ours], [], [], None if patience is None else _LOOK_SECONDS)[0]:
                heard = ours.recv(64)
                if not heard:
                    return
                if _LOOK_AT_YOUR_WATCH in heard:
                    waited = 0.0
                for number in heard:
                    self._hear(number)
            elif patience is not None and (name := self.signal_name) is not None:
                waited += _LOOK_SECONDS
                if waited >= patience and self._patience is not None:
                    with contextlib.suppress(OSError, ValueError):  # nobody may read it any more
                        tell(str(Stopped(name)), every_rank_sees_it=True)
                    self._leave(EXIT_RUN_ME_AGAIN)

    def _hear(self, number: int) -> None:
        if number not in self._before or signal.getsignal(number) != self._receive:
            return  # not ours, or no longer: a launcher passes them on while its ranks run
        self._note(number)
        if number == signal.SIGINT:
            self._interrupted()

    def _interrupted(self) -> None:
        now = self._clock()
        if self._interrupted_at is None:
            self._interrupted_at = now
        elif now - self._interrupted_at >= _SAME_PRESS_SECONDS:
            with contextlib.suppress(OSError):  # nobody may read it any more
                os.write(_STDERR, b"\nleaving at once\n")  # the main thread may be in a print
            self._leave(EXIT_INTERRUPTED)
        self.interrupts += 1


def ignore_stop_signals() -> None:
    """For a process whose exit code is settled: a signal while it is torn down changes nothing."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


_listened_to: set[int] = set()
"""Descriptors that a signal of this process writes to."""


def _deaf_in_child() -> None:
    """A fork has the descriptor too, and its signals are not ours."""
    if _listened_to:
        _listened_to.clear()
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_deaf_in_child)
