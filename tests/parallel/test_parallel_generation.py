"""Generation on a mesh: ranks go on with the same tokens, whatever each would have chosen."""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import torch.distributed as dist
from parallel_cases import Case, built

from armillary.parallel import Parallel, Scale
from armillary.precision import Precision
from ranks import run_ranks

CASE = Case(
    scale=Scale(precision=Precision(compute="float32"), parallel=Parallel(ep=2)), experts=True
)
END = 0
BY_RANK = ([[5, 6], [7, END], [8, END], [END, END]], [[5, 6], [END, END]])
"""What ranks choose for both rows, one token after the other: the second would end sooner."""


def written() -> tuple[list[list[int]], int]:
    """The rows, and how often this rank was told of a token."""
    module = importlib.import_module("armillary.inference.generate")
    model = built(CASE).eval()
    told: list[Any] = []
    choices = BY_RANK[dist.get_rank()] + [[END] * 2] * 9
    with mock.patch.object(module, "choose", side_effect=choices):
        rows = module.generate(
            model, [[1, 2], [3]], max_new_tokens=6, eos_id=END, on_token=lambda *t: told.append(t)
        )
    return rows, len(told)


def test_ranks_that_would_choose_different_tokens_take_those_of_rank_0() -> None:
    assert run_ranks(written, 2, timeout=60) == [([[5, 7, 8], [6]], 4)] * 2
