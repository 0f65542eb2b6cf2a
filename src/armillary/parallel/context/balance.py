"""Which tokens of a row each rank of `cp` holds."""

from __future__ import annotations

import torch
from torch import Tensor

from armillary.parallel.config import Parallel


def head_tail(parallel: Parallel) -> bool:
    """Whether ranks hold two chunks of each row; ulysses computes whole rows and needs none."""
    return parallel.context_balance == "head-tail" and parallel.context != "ulysses"


def chunks_of(rank: int, ranks: int, *, head_tail: bool) -> tuple[int, ...]:
    """Which of a row's equal chunks a rank holds, in order.

    A query at place i has i + 1 keys, so with one part each the last rank would have almost twice
    the average work. Of 2R chunks, rank r takes r and 2R - 1 - r: as many keys for every rank.
    (Llama 3, arXiv 2407.21783, section 3.3.2)
    """
    return (rank, 2 * ranks - 1 - rank) if head_tail else (rank,)


def indices_by_rank(
    length: int, ranks: int, *, head_tail: bool, device: torch.device | str = "cpu"
) -> Tensor:
    """`[R, S / R]` int64: for each rank the indices of its tokens in the row, ascending."""
    count = 2 * ranks if head_tail else ranks
    assert length % count == 0, f"{length} tokens do not make {count} equal chunks"
    chunks = torch.arange(length, device=device).view(count, -1)
    order = [
        chunk for rank in range(ranks) for chunk in chunks_of(rank, ranks, head_tail=head_tail)
    ]
    return torch.stack([chunks[chunk] for chunk in order]).view(ranks, -1)
