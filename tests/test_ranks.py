"""The helper that runs ranks, which every distributed test leans on."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks


def _sum_of_ranks(offset: int) -> tuple[int, int, torch.Tensor]:
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return int(os.environ["RANK"]), torch.get_num_threads(), total


def _one_raises() -> None:
    if dist.get_rank() == 1:
        print("a hint")
        raise ValueError("rank one is broken")
    dist.barrier()


def _one_dies() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def _hang() -> None:
    time.sleep(60)


def test_results_come_in_order_of_rank_from_one_process_group() -> None:
    results = run_ranks(_sum_of_ranks, 2, offset=1)
    assert [(rank, threads) for rank, threads, _ in results] == [(0, 1), (1, 1)]
    assert all(torch.equal(total, torch.tensor([3])) for _, _, total in results)


def test_the_rank_that_failed_first_is_told_first_with_what_it_printed() -> None:
    with pytest.raises(AssertionError, match=r"(?s)\Arank 1 failed:.*broken.*a hint"):
        run_ranks(_one_raises, 2)


def test_a_rank_that_dies_or_hangs_ends_the_call() -> None:
    with pytest.raises(AssertionError, match="rank 1 sent no result"):
        run_ranks(_one_dies, 2)
    with pytest.raises(AssertionError, match=r"rank 0 sent no result .*limit 0.5 s"):
        run_ranks(_hang, 1, timeout=0.5)


def test_a_function_that_ranks_cannot_import_is_refused() -> None:
    with pytest.raises(TypeError, match="module level"):
        run_ranks(lambda: None, 1)
