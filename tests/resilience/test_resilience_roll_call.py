"""Who is missing when a collective breaks, asked at a store that all ranks reach."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from armillary.foundation.errors import Problem, RunError
from armillary.resilience.roll_call import RollCall

PERIOD = 1e-3
BROKEN = RuntimeError(
    "[/there/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:29500. Its typical causes: many"
)
"""As gloo words it."""


class Remembered:
    """A store in memory; of ranks that live, each look finds one more sign of life."""

    def __init__(self, *dead: int) -> None:
        self.dead = {f"armillary/alive/{rank}" for rank in dead}
        self.counts: Counter[str] = Counter()
        self.values: dict[str, str] = {}
        self.looks = 0
        self.beaten = threading.Event()

    def add(self, key: str, amount: int, /) -> int:
        if amount:
            self.beaten.set()
        elif key.startswith("armillary/alive/") and key not in self.dead:
            self.looks += 1
            amount = 1
        self.counts[key] += amount
        return self.counts[key]

    def set(self, key: str, value: str, /) -> None:
        self.values[key] = value

    def get(self, key: str, /) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str], /) -> bool:
        return all(key in self.values for key in keys)


def calls(store: Remembered, world_size: int) -> list[RollCall]:
    return [
        RollCall(store, rank=rank, world_size=world_size, period=PERIOD)
        for rank in range(world_size)
    ]


def test_the_lost_are_named_and_who_asks_later_hears_of_the_same() -> None:
    store = Remembered(2, 3)
    first, second, *_ = calls(store, 4)
    told = r"ranks 2, 3 are gone, so no step can be finished: Connection .*29500\n"
    with pytest.raises(RunError, match=told) as raised, first.naming_the_lost():
        raise BROKEN
    assert raised.value.__cause__ is BROKEN
    store.dead.add("armillary/alive/0")  # the first one has left by now
    looks = store.looks
    assert second.lost() == [2, 3] and store.looks == looks


def test_other_errors_pass_as_they_are() -> None:
    store = Remembered(1)
    (call, _) = calls(store, 2)
    for error in (ValueError("no shard"), RunError(Problem("connection refused: of our own"))):
        with pytest.raises(type(error)) as raised, call.naming_the_lost():
            raise error
        assert raised.value is error
    store.dead.clear()
    with pytest.raises(RuntimeError) as unexplained, call.naming_the_lost():
        raise BROKEN  # everyone is there
    assert unexplained.value is BROKEN
    alone = RollCall(store, rank=0, world_size=1)
    with pytest.raises(RuntimeError) as raised_alone, alone, alone.naming_the_lost():
        raise BROKEN
    assert raised_alone.value is BROKEN


def test_of_many_ranks_a_few_look_and_the_others_are_told() -> None:
    store = Remembered()
    world_size = 40
    found = [call.lost() for call in calls(store, world_size)]
    assert found == [[]] * world_size
    assert store.looks == 8 * 2 * world_size
    store.set("armillary/lost", "7 9")
    assert calls(store, world_size)[0].lost() == [7, 9]
    assert store.looks == 8 * 2 * world_size


def test_a_store_that_does_not_answer_went_with_rank_0() -> None:
    class Gone(Remembered):
        def check(self, keys: list[str], /) -> bool:
            raise ConnectionError

    assert RollCall(Gone(), rank=1, world_size=2, period=PERIOD).lost() == [0]


def test_a_rank_gives_signs_of_life_while_it_is_entered() -> None:
    store = Remembered()
    with RollCall(store, rank=1, world_size=2):
        assert store.beaten.wait(30)
    assert store.counts["armillary/alive/1"] >= 1


def test_who_waits_in_a_collective_hears_the_finding_before_the_store_goes() -> None:
    store = Remembered(2)
    finder, waiting, *_ = calls(store, 4)
    with waiting:
        with pytest.raises(RunError, match="rank 2 is gone"), finder.naming_the_lost():
            raise BROKEN
        store.values = None  # type: ignore[assignment]  # the finder hosted it and has left
        with pytest.raises(RunError, match="rank 2 is gone"), waiting.naming_the_lost():
            raise BROKEN


def test_rank_0_stays_until_those_that_are_left_have_heard() -> None:
    store = Remembered()
    store.set("armillary/lost", "2")
    host, slow = (RollCall(store, rank=rank, world_size=3, period=1.0) for rank in (0, 1))
    leaving = threading.Thread(target=host.lost)
    leaving.start()
    leaving.join(0.5)
    assert leaving.is_alive()
    assert slow.lost() == [2]
    leaving.join(60)
    assert not leaving.is_alive() and store.counts["armillary/heard"] == 2
