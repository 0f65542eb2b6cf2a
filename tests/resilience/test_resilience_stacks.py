"""Where threads are, and which waits are waits for other ranks."""

from __future__ import annotations

import faulthandler
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
import torch
import torch.distributed as dist

from armillary.checkpoint.ranks import Ranks
from armillary.resilience.watchdog_stacks import (
    Place,
    all_stacks,
    is_debugged,
    native_frames,
    place_of,
    threads_waited_for,
)
from ranks import run_ranks


@contextmanager
def at(work: Callable[[], object], name: str = "worker") -> Iterator[int]:
    """A thread that is in the middle of `work`, which ends after it."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    assert thread.ident is not None
    yield thread.ident
    thread.join(30)


def found(thread: int, look: Callable[[Place], bool]) -> Place:
    """Where a thread is, once it is there."""
    for _ in range(3000):
        place = place_of(thread)
        if place is not None and look(place):
            return place
        threading.Event().wait(0.01)
    raise AssertionError(f"it came to {place_of(thread)}")


def test_a_wait_for_another_thread_is_followed_to_that_thread() -> None:
    free = threading.Event()

    def busy() -> None:
        while not free.is_set():
            pass

    def waits() -> None:
        busy_thread = threading.Thread(target=busy, name="busy", daemon=True)
        busy_thread.start()
        busy_thread.join()

    with at(waits) as thread:
        place = found(thread, lambda place: "busy" in place.frames[0])
        assert place.waits_in == "" and not place.opaque
        assert len(threads_waited_for(thread)) == 1
        assert "busy" in all_stacks() and "garbage collection: automatic" in all_stacks()
        free.set()
    assert place_of(thread) is None


def reduced() -> None:
    dist.all_reduce(torch.ones(2))


def gathered() -> None:
    dist.all_gather_object([None, None], 1)


def waited() -> None:
    work = dist.all_reduce(torch.ones(2), async_op=True)
    work.wait()


def waits_seen(cases: dict[Callable[[], None], str]) -> None:
    """On rank 0, in each case, what it waits in while rank 1 does not come."""
    other = dist.new_group(backend="gloo")
    ranks = Ranks()
    agreed = {lambda: ranks.together(int): "work.wait(timeout=_GLANCE)"}
    for work, words in [*cases.items(), *agreed.items()]:
        if dist.get_rank() == 0:
            with at(work) as thread:
                found(thread, lambda place, words=words: place.waits_in == words)
                dist.barrier(group=other)
        else:
            dist.barrier(group=other)
            work()


def test_waits_in_collectives_are_told_from_their_stacks() -> None:
    cases = {reduced: "all_reduce", gathered: "all_gather_object", waited: "work.wait()"}
    run_ranks(waits_seen, 2, cases)


def test_what_the_c_library_left_of_a_stuck_process_is_read(tmp_path: Path) -> None:
    path = tmp_path / "native.txt"
    with path.open("w") as file:
        faulthandler.dump_traceback_later(0.1, file=file)
        for _ in range(3000):
            if "test_what_the_c_library" in path.read_text():
                break
            threading.Event().wait(0.01)
        faulthandler.cancel_dump_traceback_later()
    assert "test_resilience_stacks.py" in native_frames(path.read_text())
    assert native_frames("") == ""


@pytest.mark.parametrize(
    "look", [place_of, is_debugged, threads_waited_for, lambda _: all_stacks()]
)
def test_a_look_keeps_no_frame_alive_whose_locals_may_be_tensors(
    look: Callable[[int], object],
) -> None:
    gc.collect()
    gc.disable()
    try:
        look(threading.get_ident())
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert not [each for each in gc.garbage if isinstance(each, FrameType)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
