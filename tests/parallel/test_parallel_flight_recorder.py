"""What torch's flight recorder tells; torch 2.11 to 2.13 have the private names that are used."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from armillary.parallel import flight_recorder, process
from ranks import run_ranks


def test_the_recorder_of_this_torch_has_one_of_the_names_that_are_used() -> None:
    assert torch.__version__.split(".")[:2] in (["2", "11"], ["2", "12"], ["2", "13"])
    assert flight_recorder._dumping() is not None


def recorded() -> tuple[dict[str, int], list[str], bytes]:
    for _ in range(3):
        dist.all_reduce(torch.ones(2))
    deadline = time.monotonic() + 30
    while flight_recorder.unfinished() and time.monotonic() < deadline:
        time.sleep(0.01)  # gloo's own thread notes the end of what was waited for
    return dict(flight_recorder.begun()), flight_recorder.unfinished(), flight_recorder.dump()


def test_collectives_are_counted_by_group_on_each_rank() -> None:
    for counts, unfinished, dump in run_ranks(recorded, 2):
        assert counts == {"default_pg 0": 3} and unfinished == []
        assert b"all_reduce" in dump


def pending() -> list[str]:
    """What rank 0 has not ended while it knows that rank 1 has not begun."""
    if dist.get_rank() == 1:
        dist.recv(torch.zeros(1), src=0)
        dist.all_reduce(torch.ones(2))
        return []
    work = dist.all_reduce(torch.ones(2), async_op=True)
    found = flight_recorder.unfinished()
    dist.send(torch.zeros(1), dst=1)
    work.wait()
    return found


def test_a_collective_that_waits_for_another_rank_is_told() -> None:
    (told,), _ = run_ranks(pending, 2)
    assert told == "gloo:all_reduce, number 1 of default_pg 0"


def test_what_no_recorder_or_another_one_says_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for dumping in (None, lambda: b"", lambda: b"[]", lambda: b'{"entries": [{"state": 1}]}'):
        monkeypatch.setattr(flight_recorder, "_dumping", lambda dumping=dumping: dumping)
        assert flight_recorder.begun() == {} and flight_recorder.unfinished() == []


def gathered() -> list[list[float]]:
    return process.gather([float(dist.get_rank()), 0.5])


def test_rows_of_all_ranks_come_together_on_rank_0() -> None:
    assert run_ranks(gathered, 3) == [[[0.0, 0.5], [1.0, 0.5], [2.0, 0.5]], [], []]
    assert process.gather([1.0]) == [[1.0]]
