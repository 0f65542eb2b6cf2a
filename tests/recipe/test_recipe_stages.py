"""A recipe with stages: which steps each takes, with which recipe, and what is refused."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest

from armillary.foundation.errors import UserError
from armillary.models.llama import Llama
from armillary.optim.adamw import AdamW
from armillary.optim.schedule import Linear, WarmupStableDecay
from armillary.parallel.replicas.config import Replicas
from armillary.recipe.budget import Budget
from armillary.recipe.coerce import describe
from armillary.recipe.overrides import TableLayer, apply, split_options
from armillary.recipe.plain import recipe_sha256
from armillary.recipe.problems import problems
from armillary.recipe.recipe import Recipe
from armillary.recipe.stages import Stage, spans_of
from armillary.recipe.toml import to_toml

LONG = ("budget.seq_len=512", "model.rope-theta=1e6", "budget.batch_tokens=8192")


def staged(*stages: Stage, **changes: object) -> Recipe:
    recipe = Recipe(
        model=Llama(
            vocab_size=320, dim=32, n_layers=1, n_heads=2, n_kv_heads=2, ffn_dim=64, max_seq_len=512
        ),
        budget=Budget(batch_tokens=2048, seq_len=256),
        schedule=WarmupStableDecay(warmup_steps=10, decay_fraction=0.5),
        stages=stages,
    )
    return replace(recipe, **changes)


def messages(recipe: Recipe, world_size: int = 1) -> list[str]:
    return [problem.message for problem in problems(recipe, world_size, data=False)]


def test_a_recipe_without_stages_is_its_own_only_stage() -> None:
    recipe = Recipe(budget=Budget(tokens=10_000.0, batch_tokens=4096))
    (span,) = spans_of(recipe)
    assert span.recipe is recipe
    assert (span.first, span.last, span.total_steps, span.is_last) == (0, 3, 3, True)
    assert recipe.total_steps == 3
    assert [recipe.stage_at(step)[0] for step in (0, 1, 3, 9)] == [0] * 4
    assert recipe.stage_at(2)[1] is recipe


def test_each_stage_is_the_recipe_with_its_leaves_and_takes_its_own_steps() -> None:
    recipe = staged(Stage(name="short", steps=100), Stage(tokens=80_000.0, set=LONG))
    short, long = spans_of(recipe)
    assert (short.first, short.last, short.is_last, short.name) == (0, 100, False, "short")
    assert (long.first, long.last, long.is_last, long.name) == (100, 110, True, "1")
    assert recipe.total_steps == 110  # 80,000 tokens are 10 steps of 8,192
    assert [recipe.stage_at(step)[0] for step in (1, 100, 101, 110)] == [0, 0, 1, 1]
    assert short.recipe == replace(recipe, stages=(), budget=replace(recipe.budget, steps=110))
    own = recipe.stage_at(101)[1]
    assert (own.budget.seq_len, own.budget.batch_tokens, own.model.rope_theta) == (512, 8192, 1e6)
    assert own.budget.total_steps == recipe.total_steps
    assert (own.stages, own.seed, own.data) == ((), recipe.seed, recipe.data)
    assert messages(recipe) == []


def test_the_schedule_is_the_runs_unless_a_stage_sets_a_leaf_of_it_or_the_rate() -> None:
    recipe = staged(
        Stage(steps=60),
        Stage(steps=20, set=("optimizer.weight_decay=0",)),
        Stage(steps=20, set=("optimizer.lr=1e-4", "schedule.warmup_steps=4")),
        Stage(steps=20, set=("schedule=linear", "schedule.warmup_steps=0")),
    )
    first, second, third, fourth = (span.factor() for span in spans_of(recipe))
    whole = recipe.schedule.build(120)
    assert [first(step) for step in range(60)] == [whole(step) for step in range(60)]
    assert [second(step) for step in range(60, 80)] == [whole(step) for step in range(60, 80)]
    own = replace(recipe.schedule, warmup_steps=4).build(20)
    assert [third(80 + step) for step in range(20)] == [own(step) for step in range(20)]
    line = Linear(warmup_steps=0).build(20)
    assert [fourth(100 + step) for step in range(20)] == [line(step) for step in range(20)]


def test_stages_are_written_read_and_told_apart_like_any_leaf() -> None:
    options = ["--budget.steps", "none", "--stages.0.steps", "5", "--stages.1.tokens", "4096"]
    options += ["--stages.1.set", 'optimizer.lr=1e-4,data.corpus.files=["a","b"]']
    base = replace(staged(), optimizer=AdamW())
    with pytest.raises(UserError, match=r"no data\.corpus\.files"):
        spans_of(apply(base, options=split_options(options)[1]))
    options[-1] = "optimizer.lr=1e-4,compile.enabled"
    recipe = apply(base, options=split_options(options)[1])
    assert recipe.stages == (
        Stage(steps=5),
        Stage(tokens=4096.0, set=("optimizer.lr=1e-4", "compile.enabled")),
    )
    assert recipe.stage_at(6)[1].compile.enabled
    again = apply(Recipe(), [TableLayer(tomllib.loads(to_toml(recipe)), "here")])
    assert again == recipe
    assert recipe_sha256(again) == recipe_sha256(recipe) != recipe_sha256(base)
    assert "set by number" in describe(tuple[Stage, ...])


def test_what_is_wrong_with_the_list_of_stages_is_told_at_once() -> None:
    recipe = staged(
        Stage(name="a"),
        Stage(name="a", steps=0),
        Stage(tokens=float("inf")),
        Stage(steps=3, tokens=3.0),
        budget=Budget(steps=100),
        replicas=Replicas(lighthouse="localhost:1"),
    )
    found = problems(recipe, data=False)
    assert [problem.message for problem in found] == [
        "budget.steps = 100, and the recipe has stages, which say how long each is",
        "replicas.lighthouse is set, and the recipe has stages: groups cannot cross a border",
        "2 stages are called 'a'",
        "stages.0.steps and stages.0.tokens are both none: it has no length",
        "stages.1.steps = 0 is out of range",
        "stages.2.tokens = inf is out of range",
        "stages.3.steps and stages.3.tokens are both set",
    ]
    assert found[0].fix == "--budget.steps none"


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        ("seed=3", "sets seed, which is one for the whole run"),
        ("checkpoint.every=3", "sets checkpoint.every, which is one for the whole run"),
        ("data.tokenizer=bytes", "sets data.tokenizer, which is one for the whole run"),
        ("optimizer=muon", "sets optimizer, which is one for the whole run"),
        ("budget.steps=3", "sets budget.steps, which is one for the whole run"),
        ("stages.0.steps=3", "sets stages.0.steps, which is one for the whole run"),
        ("model.dim=64", "makes another model, of"),
        ("budget.seq_lenn=3", "there is no budget.seq_lenn"),
        ("budget.seq_len=many", "budget.seq_len = many does not fit"),
        ("budget.seq_len=100", "budget.batch_tokens = 2048 is no multiple of budget.seq_len = 100"),
        ("budget.seq_len=1024", "budget.seq_len = 1024 is above model.max_seq_len = 512"),
        ("schedule.warmup_steps=30", "30 steps of warm-up and 10 of decay do not fit"),
    ],
)
def test_what_a_stage_may_not_set_or_cannot_is_refused_with_its_name(leaf: str, words: str) -> None:
    recipe = staged(Stage(steps=100), Stage(name="later", steps=20, set=(leaf,)))
    found = messages(recipe)
    assert len(found) == 1, found
    assert found[0].startswith("stage later: ")
    assert words in found[0]


def test_what_is_wrong_with_all_stages_is_told_once_and_proposals_name_the_stages_own_leaves() -> (
    None
):
    stages = Stage(steps=100), Stage(name="later", steps=20, set=("budget.seq_len=100",))
    recipe = staged(*stages, optimizer=AdamW(lr=-1.0))
    found = problems(recipe, data=False)
    assert [problem.message for problem in found] == [
        "optimizer.lr = -1.0",
        "stage later: budget.batch_tokens = 2048 is no multiple of budget.seq_len = 100",
    ]
    assert found[1].fix == "in its set: budget.batch_tokens=2000"
    assert problems(staged(Stage(steps=10), Stage(tokens=1e30)), data=False)[0].message == (
        "stages.1.tokens = 1e+30 is out of range"
    )
    narrow = staged(Stage(steps=10), Stage(steps=10, set=("parallel.tp=4", "parallel.dp_shard=1")))
    assert messages(narrow, 1) != []
    assert all(message.startswith("stage 1: ") for message in messages(narrow, 1))
    halves = staged(Stage(steps=10), Stage(steps=10, set=("parallel.tp=2", "parallel.dp_shard=1")))
    (few,) = problems(halves, 1, data=False, more_ranks="--nproc")
    assert few.fix == "--nproc 2", "no leaf, so nothing that a stage sets"
