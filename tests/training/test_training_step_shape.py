"""How the sequences of a step are dealt: to any number of ranks, with the same answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.parallel.config import Parallel
from armillary.parallel.schedules import SCHEDULES, deal, takes
from armillary.recipe.problems import problems
from armillary.recipe.recipe import Recipe
from armillary.recipe.registry import get
from armillary.training.step_shape import StepShape
from armillary.training.train import train
from ranks import run_ranks
from tiny_runs import events_of, steps_of, tiny_recipe, write_corpus

RELATIVE = 1e-5


def shapes(
    sequences: int, microbatch: int, data_size: int, parallel: Parallel
) -> Sequence[StepShape]:
    """Those of all data ranks."""
    return [
        StepShape.of(
            batch_tokens=sequences * 8,
            seq_len=8,
            microbatch=microbatch,
            data_rank=rank,
            data_size=data_size,
            parallel=parallel,
            uneven=True,
        )
        for rank in range(data_size)
    ]


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 70),
    st.integers(0, 9),
    st.integers(1, 9),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([*SCHEDULES]),
)
def test_every_sequence_is_dealt_once_and_all_ranks_compute_equally_many_rows(
    sequences: int, microbatch: int, data_size: int, pp: int, schedule: str
) -> None:
    parallel = Parallel(dp_shard=data_size, pp=pp, schedule=schedule).resolve(data_size * pp)
    dealt = shapes(sequences, microbatch, data_size, parallel)
    rows = [shape.rows() for shape in dealt]
    offsets = sorted(row for mine in rows for part in mine for row in part)
    assert offsets == list(range(len(offsets)))
    assert len(offsets) >= sequences
    assert {tuple(map(len, mine)) for mine in rows} == {
        (dealt[0].microbatch,) * dealt[0].accumulation
    }
    assert microbatch == 0 or dealt[0].microbatch <= microbatch
    assert takes(parallel, dealt[0].accumulation)
    padding = deal(parallel, sequences, data_size, microbatch, uneven=True).padding
    assert padding == len(offsets) - sequences
    # Padding one row less would leave the ranks or the microbatches unequal.
    assert padding < data_size * dealt[0].accumulation


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 4))
def test_what_can_be_dealt_evenly_is_not_padded(
    microbatch: int, data_size: int, accumulation: int
) -> None:
    sequences = microbatch * data_size * accumulation
    (first, *_) = shapes(sequences, microbatch, data_size, Parallel(dp_shard=data_size))
    assert (first.microbatch, first.accumulation) == (microbatch, accumulation)


def uneven(recipe: Recipe, **values: int) -> Recipe:
    return replace(recipe, budget=replace(recipe.budget, uneven=True, **values))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 24),
    st.integers(0, 5),
    st.sampled_from([1, 2, 3, 5, 6]),
    st.sampled_from(["debug", "debug-qwen3-moe"]),
    st.sampled_from([1, 2]),
)
def test_any_number_of_ranks_is_allowed_or_a_batch_is_proposed_that_is(
    sequences: int, microbatch: int, data_size: int, name: str, pp: int
) -> None:
    recipe = get(name)
    tokens = sequences * recipe.budget.seq_len
    recipe = uneven(recipe, batch_tokens=tokens, microbatch_sequences=microbatch)
    recipe = replace(recipe, parallel=Parallel(pp=pp))
    found = problems(recipe, data_size * pp, data=False)
    if name == "debug":
        assert found == []
    for problem in found:
        assert "the loads of the experts would count them" in problem.message
        assert problem.fix is not None
        recipe = uneven(recipe, batch_tokens=int(problem.fix.split()[1]))
        assert problems(recipe, data_size * pp, data=False) == []


MESHES = {
    "fsdp-3": (3, Parallel(device="cpu"), 0),
    "ddp-3-accumulated": (3, Parallel(device="cpu", dp_replicate=3, dp_shard=1), 4),
    "pp-2-fsdp-2": (4, Parallel(device="cpu", pp=2, dp_shard=2, schedule="1F1B"), 3),
}
"""Ranks, their arrangement, and the most rows at once: sixteen sequences do not divide so."""


def train_uneven(folder: str, name: str) -> int:
    torch.set_num_threads(1)
    _, parallel, microbatch = MESHES[name]
    recipe = tiny_recipe(Path(folder), steps=8, parallel=parallel)
    recipe = uneven(recipe, microbatch_sequences=microbatch)
    return train(recipe, name="tiny", folder=Path(folder) / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uneven")
    write_corpus(folder)
    assert train(tiny_recipe(folder, steps=8), name="tiny", folder=folder / "alone") == 0
    return folder


@pytest.mark.parametrize("name", MESHES)
def test_ranks_that_cannot_share_a_step_evenly_give_the_same_answer(
    name: str, folder: Path
) -> None:
    assert run_ranks(train_uneven, MESHES[name][0], str(folder), name) == [0] * MESHES[name][0]
    oracle, found = steps_of(folder / "alone"), steps_of(folder / name)
    assert [step["step"] for step in found] == list(range(1, 9))
    for mine, theirs in zip(found, oracle, strict=True):
        for field in ("tokens", "tokens_total", "samples", "sample_ids", "learning_rate"):
            assert mine[field] == theirs[field], field
        for field in ("loss", "gradient_norm"):
            assert mine[field] == pytest.approx(theirs[field], rel=RELATIVE), field
    looks = [events_of(folder / run, "validation") for run in ("alone", name)]
    for mine, theirs in zip(*looks, strict=True):
        assert mine["tokens"] == theirs["tokens"]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=RELATIVE)
