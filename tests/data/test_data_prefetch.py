"""The prefetcher keeps order, stays within its depth, and never hangs or hides an error."""

import threading
import traceback

import pytest

from armillary.data.prefetch import Prefetcher

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 3])


def makers(count: int):
    return [lambda i=i: i for i in range(count)]


@DEPTHS
def test_items_come_in_order_and_then_end(depth: int) -> None:
    with Prefetcher(makers(20), depth) as prefetcher:
        assert list(prefetcher) == list(range(20))
        assert next(prefetcher, "end") == "end"


def test_no_more_than_depth_items_are_made_ahead() -> None:
    made = [threading.Event() for _ in range(10)]
    with Prefetcher([event.set for event in made], depth=2) as prefetcher:
        assert made[1].wait(10)
        assert not made[2].wait(0.05)  # a longer wait could only find more faults, not fewer
        next(prefetcher)
        assert made[2].wait(10)  # taking one made room for one more
        assert not made[3].wait(0.05)


@DEPTHS
def test_an_error_is_raised_at_its_item_with_the_producers_traceback(depth: int) -> None:
    def broken() -> int:
        raise OSError("shard 7 is gone")

    with Prefetcher([*makers(2), broken, *makers(2)], depth) as prefetcher:
        assert [next(prefetcher), next(prefetcher)] == [0, 1]
        with pytest.raises(OSError, match="shard 7 is gone") as caught:
            next(prefetcher)
        assert "in broken" in "".join(traceback.format_tb(caught.tb))
        assert list(prefetcher) == []


@DEPTHS
def test_a_stop_iteration_inside_a_maker_is_an_error_not_an_end(depth: int) -> None:
    with (
        Prefetcher([lambda: next(iter(()))], depth) as prefetcher,
        pytest.raises(RuntimeError, match="StopIteration"),
    ):
        next(prefetcher)


@DEPTHS
def test_leaving_early_ends_the_thread(depth: int) -> None:
    def endless():
        while True:
            yield lambda: 1

    before = threading.active_count()
    with Prefetcher(endless(), depth) as prefetcher:
        assert next(prefetcher) == 1
    prefetcher.close()
    assert threading.active_count() == before
    assert list(prefetcher) == []


def test_closing_wakes_a_consumer_that_waits() -> None:
    release, waiting = threading.Event(), threading.Event()

    def slow() -> int:
        waiting.set()
        release.wait(10)
        return 1

    prefetcher = Prefetcher([slow], depth=1)
    assert waiting.wait(10)
    taken: list[object] = []
    consumer = threading.Thread(target=lambda: taken.append(next(prefetcher, "closed")))
    consumer.start()
    closer = threading.Thread(target=prefetcher.close)
    closer.start()
    consumer.join(10)
    release.set()
    closer.join(10)
    assert not consumer.is_alive()
    assert not closer.is_alive()
    assert taken == ["closed"]
