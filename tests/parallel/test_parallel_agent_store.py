"""One store of torchrun's agent serves many starts of ranks, and none hears of another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from armillary.foundation.errors import RunError
from armillary.parallel import agent_store

PATIENCE = timedelta(seconds=30)


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """What an agent serves, and the variables by which it tells the ranks."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    return server


def start(world_size: int) -> list[tuple[dist.Store, dist.Store]]:
    """The two connections of every rank of one start."""
    with ThreadPoolExecutor(world_size) as pool:
        return list(
            pool.map(lambda rank: agent_store.meet(rank, world_size, PATIENCE), range(world_size))
        )


def test_ranks_of_a_later_start_see_nothing_of_an_earlier_one() -> None:
    assert agent_store.is_shared()
    for number, world_size in enumerate((3, 4, 2, 2)):
        ranks = start(world_size)
        for rank, (ours, others) in enumerate(ranks):
            assert not ours.check(["armillary/lost"]), number
            others.set(f"rank-{rank}", "here")
        for ours, _ in ranks:
            assert all(ours.check([f"rank-{rank}"]) for rank in range(world_size))
            assert not ours.check([f"rank-{world_size}"])
        ranks[0][0].set("armillary/lost", "1")


def test_ranks_that_died_while_they_waited_are_not_counted(server: dist.TCPStore) -> None:
    for rank in (1, 2):  # of a start whose rank 0 never came
        server.set(f"armillary/ticket-of/{rank}", f"dead-{rank}")
    ranks = start(3)
    ranks[2][0].set("word", "heard")
    assert ranks[0][1].get("word") == ranks[1][0].get("word") == b"heard"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stays_alone_says_where_it_waited(rank: int) -> None:
    with pytest.raises(RunError, match=rf"rank {rank} did not meet the other 1 at 127.0.0.1:"):
        agent_store.meet(rank, 2, timedelta(seconds=0.2))
