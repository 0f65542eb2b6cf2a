"""A polite stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from armillary.resilience.roll_call import RollCall
from armillary.resilience.signals import Stopped, StopRequest

LIMIT = 30.0
"""Seconds after which something that should happen at once has not happened."""


@pytest.fixture(autouse=True)
def nobody_ignores_the_loss_of_the_terminal() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    yield
    signal.signal(signal.SIGHUP, before)


def eventually(happened: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LIMIT
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.001)
    return happened()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"])
def test_the_first_signal_sets_a_flag_and_handlers_are_put_back(name: str) -> None:
    number = signal.Signals[name]
    before = signal.getsignal(number)
    threads = threading.active_count()
    with StopRequest() as stop:
        stop.check()
        assert not stop.requested
        assert stop.seconds is None
        os.kill(os.getpid(), number)
        assert stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal_name == name  # the one that asked first
        assert stop.seconds is not None
        with pytest.raises(Stopped, match=rf"stopped on request \({name}\)") as stopped:
            stop.check()
        assert stopped.value.exit_code == 75
    assert signal.getsignal(number) is before
    assert signal.set_wakeup_fd(-1) == -1
    assert threading.active_count() == threads


def test_the_loss_of_a_terminal_stays_ignored_where_it_was_ignored_at_the_start() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what `nohup` does
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.signal_name == "SIGUSR1"  # and nothing before it
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_interrupt_leaves_at_once_unless_it_is_the_same_key_press() -> None:
    now, left = [0.0], list[int]()
    with StopRequest(clock=lambda: now[0], leave=left.append) as stop:
        for seconds in (0.0, 0.1, 0.9):  # launcher and terminal both pass on one press
            now[0] = seconds
            heard = stop.interrupts
            os.kill(os.getpid(), signal.SIGINT)
            assert eventually(lambda: stop.interrupts > heard)  # noqa: B023
        assert stop.requested and not left
        now[0] = 1.0
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert eventually(lambda: left == [130])


LEAVES = """
import ctypes, os, signal, threading, time
from armillary.resilience.signals import StopRequest

now = [0.0]
def interrupt():
    for now[0] in (0.0, 5.0):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)

with StopRequest(clock=lambda: now[0]):
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        while True:
            ctypes.CDLL(None).sleep(600)
    finally:
        print("not reached")
"""
"""The main thread is in a call of a library, where no handler of Python's runs."""


def test_leaving_at_once_ends_a_process_also_where_nobody_reads_what_it_says() -> None:
    with subprocess.Popen([sys.executable, "-c", LEAVES], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        process.stderr.close()
        assert process.wait(LIMIT) == 130


def test_leaving_at_once_ends_the_process_with_130_whatever_it_is_doing() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=LIMIT
    )
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr == "\nleaving at once\n"


class Board:
    """A store of one process that two roll calls share."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._lock = threading.Lock()

    def add(self, key: str, amount: int, /) -> int:
        with self._lock:
            self.values[key] = str(int(self.values.get(key, "0")) + amount)
            return int(self.values[key])

    def set(self, key: str, value: str, /) -> None:
        self.values[key] = value

    def get(self, key: str, /) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str], /) -> bool:
        return all(key in self.values for key in keys)


def test_a_stop_that_one_rank_is_asked_for_reaches_another_that_waits() -> None:
    board = Board()
    with (
        RollCall(board, rank=0, world_size=2, period=0.01) as first,
        RollCall(board, rank=1, world_size=2, period=0.01) as second,
        StopRequest() as asked,
    ):
        waiting = StopRequest()  # of another process
        waiting.share(first)
        os.kill(os.getpid(), signal.SIGUSR1)  # before the ranks have met
        assert not waiting.requested
        asked.share(second)
        assert eventually(lambda: waiting.requested)
        assert waiting.signal_name == "SIGUSR1"
        assert waiting.seconds is None  # the signal was not its own
        with pytest.raises(Stopped, match="SIGUSR1"):
            waiting.check()


def test_what_may_never_end_is_left_once_patience_is_over(
    capfd: pytest.CaptureFixture[str],
) -> None:
    left = list[int]()
    with StopRequest(leave=left.append) as stop:
        with stop.leaving_after(0.5):
            time.sleep(1.2)  # longer than the patience, but nobody has asked
            assert not left
            os.kill(os.getpid(), signal.SIGTERM)
            assert eventually(lambda: left[:1] == [75])
        assert "stopped on request (SIGTERM)" in capfd.readouterr().err
        left.clear()
        time.sleep(1.2)
        assert not left  # what comes after it may take its time


def test_whoever_takes_over_a_signal_has_it() -> None:
    heard = list[int]()
    with StopRequest() as stop:
        before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
        os.kill(os.getpid(), signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)
        assert heard == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGUSR1)  # heard after the other one
        assert eventually(lambda: stop.requested)
        assert stop.signal_name == "SIGUSR1"


def test_a_signal_to_a_fork_is_not_its_parents() -> None:
    with StopRequest() as stop:
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(int(not stop.requested))
        assert os.waitpid(pid, 0)[1] == 0
        os.kill(os.getpid(), signal.SIGUSR1)
        assert eventually(lambda: stop.requested)
        assert stop.signal_name == "SIGUSR1"


BLOCKED = """
import os, signal, sys
from armillary.resilience.signals import StopRequest, ignore_stop_signals
os.kill(os.getpid(), signal.SIGTERM)
with StopRequest() as stop:
    print(stop.signal_name)
ignore_stop_signals()
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(7)
"""


def test_a_signal_before_and_after_anybody_listens_changes_no_exit_code() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BLOCKED],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]),
    )
    assert (ended.returncode, ended.stdout) == (7, "SIGTERM\n"), ended.stderr
