"""Long work that can be stopped, and the yardstick that is measured so."""

from __future__ import annotations

import gzip
import lzma
import random
import threading
import time
from collections.abc import Callable

import pytest

from armillary.checkpoint.ranks import Ranks
from armillary.foundation.progress import NoProgress
from armillary.resilience.signals import Stopped, StopRequest
from armillary.training.agreed_stop import AgreedStop
from armillary.training.compressors import measure_compressors
from armillary.training.interruptible import Interruptible, leavable
from ranks import run_ranks


def stopping_after(calls: int) -> Callable[[], None]:
    left = calls

    def check() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Stopped("SIGTERM")

    return check


def test_leavable_work_gives_its_result_or_its_error_to_the_caller() -> None:
    assert leavable(lambda: threading.current_thread().name, lambda: None) == "leavable"
    error = KeyError("of the work")

    def fail() -> None:
        raise error

    with pytest.raises(KeyError) as raised:
        leavable(fail, lambda: None)
    assert raised.value is error


def test_leavable_work_is_left_in_the_middle_of_a_call() -> None:
    release = threading.Event()
    with pytest.raises(Stopped):
        leavable(release.wait, stopping_after(2))
    assert any(thread.name == "leavable" for thread in threading.enumerate())
    release.set()


def test_work_that_reports_progress_ends_before_it_is_left() -> None:
    asked = threading.Event()
    ended = []

    def check() -> None:
        if asked.is_set():
            raise Stopped("SIGTERM")

    def work() -> None:
        with Interruptible(NoProgress(), check).task("long") as advance:
            asked.set()
            try:
                while True:
                    time.sleep(0.01)
                    advance(1)
            finally:
                ended.append(True)

    with pytest.raises(Stopped):
        leavable(work, check)
    assert ended


def test_compressors_read_in_parts_what_they_would_read_at_once() -> None:
    draw = random.Random(0)
    words = [draw.randbytes(draw.randrange(2, 9)) for _ in range(300)]
    documents = [b" ".join(draw.choices(words, k=draw.choice([1, 40, 50_000]))) for _ in range(9)]
    everything = b"".join(documents)
    assert len(everything) > 2**20
    read = []
    bits = measure_compressors(documents, read.append)
    total = len(everything)
    each = sum(len(gzip.compress(text, 9)) for text in documents)
    assert bits.gzip_each == 8 * each / total
    assert bits.gzip_all == 8 * len(gzip.compress(everything, 9)) / total
    preset = 9 | lzma.PRESET_EXTREME
    assert bits.xz_all == 8 * len(lzma.compress(everything, preset=preset)) / total
    assert sum(read) == 3 * total
    assert max(read) < total / 4  # so that somebody can say stop meanwhile


def test_compressors_can_be_stopped_and_need_something_to_read() -> None:
    def advance(amount: float) -> None:
        raise Stopped("SIGTERM")

    with pytest.raises(Stopped):
        measure_compressors([b"text"], advance)
    with pytest.raises(ValueError, match="no bytes"):
        measure_compressors([b""])


class Asked(StopRequest):
    """One that got a signal some seconds ago, or none."""

    def __init__(self, name: str | None, seconds: float | None) -> None:
        super().__init__()
        self._known = name, seconds

    @property
    def signal_name(self) -> str | None:
        return self._known[0]

    @property
    def seconds(self) -> float | None:
        return self._known[1]


def agree(rank_asked: int) -> tuple[tuple[int, ...], str, float | None]:
    """The sums before, the words, and the time, on this rank."""
    ranks = Ranks()
    sums = AgreedStop(Asked(None, None), ranks).sums([2, 3])
    mine = ranks.rank == rank_asked
    stop = AgreedStop(Asked("SIGUSR1" if mine else None, 4.0 if mine else None), ranks)
    with pytest.raises(Stopped) as stopped:
        stop.check()
    return sums, str(stopped.value), stop.seconds()


def test_all_ranks_stop_at_the_same_point_with_the_same_words() -> None:
    words = str(Stopped("SIGUSR1"))
    assert run_ranks(agree, 3, 2) == [((6, 9), words, 4.0)] * 3
