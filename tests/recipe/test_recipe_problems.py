"""Impossible recipes are refused before anything starts, all problems at once."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.cli.recipe_arguments import resolve
from armillary.data.config import Mixture, Part
from armillary.parallel import Parallel
from armillary.parallel.account import Account
from armillary.parallel.schedules import SCHEDULES
from armillary.recipe import get, problems
from snapshots import assert_matches_snapshot

SNAPSHOTS = Path(__file__).parent / "snapshots" / "problems"

CASES = {
    "batch_is_no_multiple_of_sequence": ("--budget.batch-tokens 1000", 1),
    "batch_below_one_sequence_per_rank": ("--budget.batch-tokens 128", 4),
    "ranks_do_not_share_sequences_evenly": (
        "--budget.batch-tokens 1280 --parallel.dp-replicate 2",
        4,
    ),
    "microbatch_does_not_divide_share": ("--budget.microbatch-sequences 3", 4),
    "microbatch_and_ranks_do_not_divide": (
        "--budget.microbatch-sequences 3 --budget.batch-tokens 1280",
        4,
    ),
    "sequence_above_model_context": ("--budget.seq-len 2048", 1),
    "no_length": ("--budget.steps none", 1),
    "steps_and_tokens": ("--budget.steps 3 --budget.tokens 1e6", 1),
    "warmup_and_decay_overlap": ("--budget.steps 10 --schedule.warmup-steps 20", 1),
    "vocabulary_too_small": ("--data.tokenizer bpe", 1),
    "tokenizer_file_missing": ("--data.tokenizer file --data.tokenizer.path nowhere.json", 1),
    "tokenizer_out_of_range": (
        "--data.tokenizer bpe --data.tokenizer.vocab-size 5 --data.tokenizer.training-bytes 0",
        1,
    ),
    "corpus_without_files": ("--data.corpus text --data.corpus.on-bad-text explode", 1),
    "corpus_pattern_without_match": (
        "--data.corpus jsonl --data.corpus.files /no-folder-of-this-name/*.jsonl",
        1,
    ),
    "mixture_without_parts": ("--data.corpus mixture", 1),
    "library_folder_missing": ("--data.corpus.folder /no-folder-of-this-name", 1),
    "beyond_the_end": ("--validation.final-stride 512 --telemetry.profile-from 5000", 1),
    "heads": ("--model.n-kv-heads 3", 1),
    "mesh": ("--parallel.dp-shard 3", 4),
    "model_and_mesh": (
        "--parallel.pp 16 --parallel.tp 8 --parallel.ep 2 --model.n-kv-heads 4",
        128,
    ),
    "sequence_and_mesh": ("--budget.seq-len 100 --parallel.cp 8 --parallel.tp 4", 32),
    "sequence_and_tp": ("--budget.seq-len 130 --budget.batch-tokens 2080 --parallel.tp 4", 8),
    "heads_for_tokens": (
        "--parallel.context ulysses --parallel.cp 4 --parallel.tp 4 --model.attention varlen",
        16,
    ),
    "keys_elsewhere": ("--parallel.context ring --parallel.cp 2 --model.attention flex", 2),
    "layers_of_stages": (
        "--parallel.pp 2 --parallel.stage-layers 3,4 --budget.microbatch-sequences 1",
        2,
    ),
    "pipeline_unfed": ("--parallel.pp 4 --budget.microbatch-sequences 16", 4),
    "no_stages": ("--parallel.stage-layers 8,0", 2),
    "proposals_that_suit_the_model": ("--parallel.tp 2", 3),
    "only_the_cause": ("--parallel.pp 2 --parallel.stages-per-rank 5", 2),
    "microbatch_and_schedule": (
        "--parallel.pp 2 --parallel.schedule 1F1B --budget.microbatch-sequences 12",
        2,
    ),
    "pipeline_in_rounds": (
        "--parallel.pp 2 --parallel.schedule Interleaved1F1B --budget.batch-tokens 1920 "
        "--budget.microbatch-sequences 3",
        2,
    ),
    "pipeline_starved": ("--parallel.pp 8 --budget.microbatch-sequences 1", 64),
    "split_backward": (
        "--parallel.pp 2 --parallel.schedule ZBVZeroBubble --budget.microbatch-sequences 1 "
        "--compile.enabled --activation-checkpoint selective",
        2,
    ),
    "everything_of_the_mesh": ("--parallel.tp 3 --parallel.cp 3", 8),
    "float8_from_the_host": (
        "--parallel.cpu-offload true --precision.linears float8-tensorwise "
        "--precision.linears.float8-all-gather true",
        2,
    ),
    "budget_of_memory": ("--activation-checkpoint memory-budget", 1),
    "compute_dtype": ("--precision.compute float16", 1),
    "numbers_out_of_range": (
        "--seed -1 --budget.steps 0 --budget.batch-tokens -5 --budget.seq-len 0 "
        "--budget.microbatch-sequences -1 --max-gradient-norm 0 --validation.every -1 "
        "--gradient-norm-order 0.5 --sampling.temperature -1 --checkpoint.keep-last 0",
        1,
    ),
    "numbers_that_are_not": (
        "--optimizer.lr nan --optimizer.weight-decay inf --optimizer.betas 0.9,nan "
        "--model.rope-theta nan --max-gradient-norm nan --budget.tokens inf "
        "--gradient-norm-order nan",
        1,
    ),
    "everything_at_once": (
        "--seed -1 --budget.batch-tokens 1000 --budget.seq-len 2048 --optimizer.lr 0 "
        "--precision.compute float16 --data.tokenizer bpe --model.n-kv-heads 3 "
        "--parallel.dp-shard 3",
        4,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_impossible_recipe_is_refused_with_field_value_and_fix(case: str) -> None:
    typed, world_size = CASES[case]
    found = problems(resolve(["debug", *typed.split()]).recipe, world_size)
    assert found
    text = "\n".join(problem.render() for problem in found)
    assert_matches_snapshot(f"{typed} on {world_size} ranks\n\n{text}", SNAPSHOTS / f"{case}.txt")


@pytest.mark.parametrize("world_size", [1, 2, 4, 6])
@pytest.mark.parametrize(
    "typed", [CASES[case][0] for case in CASES if "micro" in case or "ranks" in case]
)
def test_the_proposed_batch_is_legal(typed: str, world_size: int) -> None:
    recipe = resolve(["debug", "--parallel.dp-replicate", "1", *typed.split()]).recipe
    for _ in range(2):  # a fix may name the batch, then the microbatch
        fixes = [
            problem.fix for problem in problems(recipe, world_size) if "budget" in problem.message
        ]
        for fix in fixes:
            assert fix is not None
            recipe = resolve(["debug", *typed.split(), *fix.split()]).recipe
    assert [p for p in problems(recipe, world_size) if "budget" in p.message] == []


@settings(max_examples=80, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "pp": st.sampled_from([1, 1, 2, 3, 4, 8]), "cp": st.sampled_from([1, 1, 2, 3, 4]),
            "tp": st.sampled_from([1, 1, 2, 3, 4, 8]), "ep": st.sampled_from([1, 1, 2, 4]),
            "dp_shard": st.sampled_from([-1, 1, 2]),
            "context": st.sampled_from(["all-gather", "ring", "ulysses"]),
            "schedule": st.sampled_from([*SCHEDULES]),
            "stages_per_rank": st.sampled_from([0, 0, 0, 1, 2, 3]),
            "stage_layers": st.sampled_from([(), (), (), (3, 5), (8,), (4, 5)]),
            "expert_tp": st.sampled_from([1, 1, 1, 2]),
        }
    ),
    st.sampled_from([1, 2, 4, 8, 12, 16]),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from([24, 128]),
)  # fmt: skip
def test_a_recipe_without_problems_can_be_cut_and_what_is_proposed_helps(
    parallel: dict[str, Any], world_size: int, microbatch: int, seq_len: int
) -> None:
    debug = get("debug")
    budget = replace(
        debug.budget, seq_len=seq_len, batch_tokens=48 * seq_len, microbatch_sequences=microbatch
    )
    recipe = replace(debug, parallel=Parallel(**parallel), budget=budget)
    found = problems(recipe, world_size, data=False)
    typed = ["debug"]
    for field, value in parallel.items():
        written = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        typed += [f"--parallel.{field}", written]
    typed += [f"--budget.{name}={getattr(budget, name)}" for name in ("seq_len", "batch_tokens")]
    typed.append(f"--budget.microbatch_sequences={microbatch}")
    assert resolve(typed).recipe == recipe
    fixes = [problem.fix for problem in found if problem.fix is not None]
    typed += [word for fix in fixes for word in shlex.split(fix)]
    recipe = resolve(typed).recipe
    found = problems(recipe, world_size, data=False)
    assert found == [], [problem.render() for problem in found]
    books = Account(recipe.model, recipe.parallel, recipe.optimizer, world_size)
    last = books.rank(world_size - 1)
    assert last.parameters and list(last.stages)


def test_what_only_the_data_machine_knows_can_be_left_out() -> None:
    recipe = resolve(["llama3-8b"]).recipe
    assert problems(recipe, 64, data=False) == []
    without = resolve(["debug", "--data.corpus", "text", "--data.validation-fraction", "2"]).recipe
    assert [problem.message for problem in problems(without, data=False)] == [
        "data.validation_fraction = 2.0"
    ]
    assert [problem.message for problem in problems(recipe, 64)] == ["data.tokenizer.path is empty"]


def test_a_split_backward_pass_goes_with_experts_and_with_blocks_that_are_recomputed() -> None:
    mesh = "--parallel.pp 2 --parallel.schedule DualPipeV --budget.microbatch-sequences 1"
    for name in ("debug", "debug-qwen3-moe", "debug-gpt-oss", "debug-deepseek"):
        for kept in ("none", "full", "every-k", "offload"):
            typed = [name, *mesh.split(), "--activation-checkpoint", kept]
            assert problems(resolve(typed).recipe, 2) == [], typed


def test_an_infinite_gradient_norm_means_no_clipping_and_an_infinite_order_the_largest() -> None:
    typed = ["--max-gradient-norm", "inf", "--gradient-norm-order", "inf"]
    assert problems(resolve(["debug", *typed]).recipe) == []


def test_a_pipeline_alone_makes_its_own_microbatches() -> None:
    for schedule in SCHEDULES:
        recipe = resolve(["debug", "--parallel.pp", "2", "--parallel.schedule", schedule]).recipe
        assert problems(recipe, 2) == [], schedule


def test_what_cannot_be_split_is_changed_rather_than_the_mesh() -> None:
    typed = ["debug-deepseek", "--model.predict-ahead", "--parallel.pp", "2", "--parallel.cp", "2"]
    found = problems(resolve(typed).recipe, 4)
    assert [problem.fix for problem in found] == ["--no-model.predict-ahead"] * 2
    assert found[1].allowed == "--no-model.predict-ahead, or parallel.cp = 1"
    assert problems(resolve([*typed, "--no-model.predict-ahead"]).recipe, 4) == []


def test_too_few_ranks_are_asked_for_where_none_were_named() -> None:
    recipe = resolve(["debug", "--parallel.tp", "2"]).recipe
    (asked,) = problems(recipe, 1, more_ranks="--nproc")
    assert asked.fix == "--nproc 2" and "needs 2 ranks, and there is 1" in asked.message
    (given_one,) = problems(recipe, 1)
    assert (given_one.allowed, given_one.fix) == ("on 1 rank: 1", "--parallel.tp 1")
    beyond = resolve(["debug", "--parallel.tp", "16"]).recipe  # no number of ranks helps
    assert "--nproc" not in str([each.fix for each in problems(beyond, 1, more_ranks="--nproc")])


def test_layers_of_stages_are_those_of_the_model_without_a_pipeline_too() -> None:
    for layers, wrong in (("8", 0), ("7", 1), ("3,5", 1), ("8,0", 1)):
        typed = ["debug", "--parallel.stage-layers", layers]
        assert len(problems(resolve(typed).recipe, 2)) == wrong, layers


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("", "validation.every = 0"),
        ("--checkpoint.every 4", "validation.every = 0 and checkpoint.every = 4"),
        ("--validation.every 3", "checkpoint.every = 0"),
        ("--validation.every 3 --checkpoint.every 4", "none of steps 1 to 11"),
        ("--validation.every 12 --checkpoint.every 12", "none of steps 1 to 11"),
        ("--validation.every 20 --checkpoint.keep-every 30", "none of steps 1 to 11"),
        ("--validation.every 4 --checkpoint.every 2 --data.validation-fraction 0", "held out"),
        ("--validation.every 4 --checkpoint.every 2 --checkpoint.best-metric valid", "'valid'"),
        ("--budget.steps 1 --validation.every 1 --checkpoint.every 1", "no checkpoint has a score"),
    ],
)
def test_the_best_are_not_kept_where_none_is_scored_and_the_proposal_helps(
    typed: str, told: str
) -> None:
    words = ["debug", "--budget.steps", "12", "--checkpoint.keep-best", "1", *typed.split()]
    (found,) = problems(resolve(words).recipe)
    assert told in found.message and found.fix is not None
    assert problems(resolve([*words, *found.fix.split()]).recipe) == []


def test_the_best_are_kept_where_one_kind_of_save_is_scored_by_a_set_of_the_recipe() -> None:
    words = ["debug", "--budget.steps", "13", "--checkpoint.keep-best", "1"]
    for typed in (
        "--validation.every 3 --checkpoint.every 4",
        "--validation.every 5 --checkpoint.every 7 --checkpoint.ephemeral-every 10",
    ):
        assert problems(resolve([*words, *typed.split()]).recipe) == []
    recipe = resolve([*words, "--validation.every", "4", "--checkpoint.every", "4"]).recipe
    part = Part(corpus=recipe.data.corpus)
    mixture = replace(recipe, data=replace(recipe.data, corpus=Mixture(parts=(part, part))))
    (found,) = problems(mixture)
    assert found.allowed == "validation-0, validation-1"
    saves = replace(recipe.checkpoint, best_metric="validation-1")
    assert problems(replace(mixture, checkpoint=saves)) == []
