"""Generation on a mesh: ranks go on with the same tokens, whatever each would have chosen, and
hidden states are of whole rows."""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from parallel_cases import LENGTH, VOCABULARY, Case, built
from torch import Tensor

from armillary.parallel import Parallel, Scale
from armillary.precision import Precision
from ranks import run_ranks

FP32 = Precision(compute="float32")
CASE = Case(scale=Scale(precision=FP32, parallel=Parallel(ep=2)), experts=True)
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


PARALLELS = {
    "TP 2 x CP 2": Parallel(tp=2, cp=2),
    "PP 2 x TP 2": Parallel(pp=2, tp=2),
    "TP 2 x EP 2": Parallel(tp=2, ep=2),
}


def case_of(parallel: Parallel) -> Case:
    scale = Scale(precision=FP32, parallel=parallel)
    return Case(scale=scale, experts=parallel.ep > 1)


def tokens_of(length: int) -> Tensor:
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(length))


def last_and_all(case: Case) -> list[Tensor]:
    """Of rows that ranks would divide and of others: logits of the last tokens, and of all."""
    model = built(case)
    found = []
    for training, length in ((True, LENGTH), (False, LENGTH), (False, LENGTH - 1)):
        tokens = tokens_of(length)
        model.train(training)
        found.append(model(tokens, output=lambda hidden, head: head.logits(hidden[:, -1])))
        found.append(model(tokens))
    return found


def on_meshes(cases: list[Case]) -> list[list[Tensor]]:
    return [last_and_all(case) for case in cases]


def test_the_last_hidden_state_is_that_of_the_last_token_of_whole_rows_on_every_rank() -> None:
    cases = [case_of(parallel) for parallel in PARALLELS.values()]
    alone = [last_and_all(Case(scale=Scale(precision=FP32), experts=c.experts)) for c in cases]
    for rank in run_ranks(on_meshes, 4, cases):
        for name, found, expected in zip(PARALLELS, rank, alone, strict=True):
            for ours, theirs in zip(found, expected, strict=True):
                assert ours.shape == theirs.shape, name
                assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max(), name
