"""A polite stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from armillary.resilience.signals import Stopped, StopRequest


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_the_first_signal_sets_a_flag_and_handlers_are_put_back(name: str) -> None:
    number = signal.Signals[name]
    before = signal.getsignal(number)
    with StopRequest() as stop:
        stop.check()
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal_name == name  # the one that asked first
        with pytest.raises(Stopped, match=rf"stopped on request \({name}\)") as stopped:
            stop.check()
        assert stopped.value.exit_code == 75
    assert signal.getsignal(number) is before


def test_a_second_interrupt_leaves_at_once_unless_it_is_the_same_key_press() -> None:
    now, left = [0.0], list[int]()
    with StopRequest(clock=lambda: now[0], leave=left.append) as stop:
        for seconds in (0.0, 0.1, 0.9):  # launcher and terminal both pass on one press
            now[0] = seconds
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested and not left
        now[0] = 1.0
        os.kill(os.getpid(), signal.SIGTERM)
        assert not left
        os.kill(os.getpid(), signal.SIGINT)
        assert left == [130]


def test_leaving_at_once_ends_the_process_with_130_whatever_it_is_doing() -> None:
    program = (
        "import os, signal\n"
        "from armillary.resilience.signals import StopRequest\n"
        "ticks = iter([0.0, 5.0])\n"
        "with StopRequest(clock=lambda: next(ticks)):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    finally:\n"
        "        print('not reached')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr == "\nleaving at once\n"
