"""Stages: a border is a resume without a process ending, and the run is the same however it ends.

The run of `staged_runs` changes its mixture at the first border and its context at the second.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded_runs import equal, poisoned, run, saved_steps, weights_of

from armillary.checkpoint.store import CheckpointStore
from armillary.data.config import Bpe
from armillary.foundation.errors import RunError, UserError
from armillary.foundation.progress import NoProgress
from armillary.inference.load import load_trained
from armillary.parallel.compile import forget_compiled
from armillary.parallel.config import Compile, Parallel
from armillary.recipe.recipe import Recipe
from armillary.recipe.stages import Stage, spans_of
from armillary.recipe.toml import to_toml
from armillary.resilience.guard_config import Rewind, Stop
from armillary.resilience.guard_dump import read_replay
from armillary.training import prepare, session
from armillary.training.replay import replay
from armillary.training.session import Session
from ranks import run_ranks
from reliability.zygote import Zygote
from staged_runs import LENGTHS, LONGER, MIXED, staged_recipe, told, write_corpora
from tiny_runs import events_of, steps_of

FIRST, SECOND, LAST = LENGTHS[0], LENGTHS[0] + LENGTHS[1], sum(LENGTHS)
"""The borders and the end."""


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the corpora, and in `whole` the run that nobody interrupted."""
    folder = tmp_path_factory.mktemp("stages")
    write_corpora(folder)
    assert run(staged_recipe(folder), folder / "whole") == 0
    return folder


@pytest.fixture
def recipe(ground: Path) -> Recipe:
    return staged_recipe(ground)


def with_stage(recipe: Recipe, index: int, **changes: Any) -> Recipe:
    stages = list(recipe.stages)
    stages[index] = replace(stages[index], **changes)
    return replace(recipe, stages=tuple(stages))


def copy_of(run_folder: Path, to: Path, up_to: int) -> Path:
    """The run as it was when the checkpoint of a step was its newest."""
    shutil.copytree(run_folder, to)
    for step in saved_steps(to):
        if step > up_to:
            shutil.rmtree(to / "checkpoints" / f"step-{step:08d}")
    return to


STAYING = {FIRST: "permanent", SECOND: "permanent", LAST: "final"}


def kinds_of(run_folder: Path) -> dict[int, str]:
    """What kind of checkpoint there is, by step."""
    checkpoints = run_folder / "checkpoints"
    return {
        step: json.loads((checkpoints / f"step-{step:08d}/manifest.json").read_text())["kind"]
        for step in saved_steps(run_folder)
    }


def test_each_stage_trains_with_its_own_recipe_over_positions_that_count_on(
    ground: Path, recipe: Recipe
) -> None:
    whole = ground / "whole"
    stages = events_of(whole, "stage")
    spans = spans_of(recipe)
    assert [(e["name"], e["step"], e["first_step"], e["last_step"]) for e in stages] == [
        ("short", 0, 1, FIRST),
        ("mixed", FIRST, FIRST + 1, SECOND),
        ("longer", SECOND, SECOND + 1, LAST),
    ]
    assert [event["set"] for event in stages] == [[], list(MIXED), list(LONGER)]
    steps = steps_of(whole)
    assert [step["step"] for step in steps] == list(range(1, LAST + 1))
    ends = [0, *(step["samples"][1] for step in steps)]
    assert [step["samples"][0] for step in steps] == ends[:-1]
    assert [event["cursor"] for event in stages] == [0, ends[FIRST], ends[SECOND]]
    for span in spans:
        for step in steps[span.first : span.last]:
            rate = span.recipe.optimizer.lr * span.factor()(step["step"] - 1)
            assert step["learning_rate"] == pytest.approx(rate, rel=1e-12)
            of_b = [sample >> 40 for sample in step["sample_ids"]]
            share = (0.25, 0.75, 0.75)[span.index]
            assert abs(sum(of_b) - share * len(of_b)) <= 1
    (start,) = events_of(whole, "start")
    assert start["total_steps"] == LAST
    looks = [e for e in events_of(whole, "validation") if e["name"] == "validation-0"]
    assert [event["step"] for event in looks] == [4, 8, 12, 16, 20]
    assert looks[2]["tokens"] < looks[3]["tokens"], "as many rows, of twice the length"


def test_no_sample_of_a_corpus_that_goes_on_comes_twice(ground: Path) -> None:
    seen = [sample for step in steps_of(ground / "whole")[:SECOND] for sample in step["sample_ids"]]
    assert len({*seen}) == len(seen) == 16 * SECOND


def test_the_state_at_a_border_stays_however_few_checkpoints_do(ground: Path) -> None:
    assert kinds_of(ground / "whole") == STAYING


def test_a_run_killed_at_random_sees_the_samples_of_the_undisturbed_one_to_the_last_bit(
    ground: Path, zygote: Zygote
) -> None:
    (ground / "staged.toml").write_text(to_toml(staged_recipe(ground)))
    command = ["train", "--from-file", "staged.toml", "--run", "killed"]
    draw, killed = random.Random(4), 0
    while killed < 2:
        process = zygote.start(command, cwd=ground, output=ground / "said")
        wanted = draw.randint(3, 9)
        log, size = ground / "killed/events.jsonl", _size(ground / "killed/events.jsonl")
        while process.poll() is None:
            if log.exists() and log.read_bytes()[size:].count(b'"kind":"step"') >= wanted:
                process.kill()
                killed += 1
        assert process.wait() == -9, process.output()
    assert zygote.start(command, cwd=ground, output=ground / "said").wait() == 0
    assert told(ground / "killed") == told(ground / "whole")
    assert equal(weights_of(ground / "killed", LAST), weights_of(ground / "whole", LAST))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@pytest.mark.parametrize(
    ("where", "saved"),
    [
        # of the state at the border
        pytest.param((CheckpointStore, "save", 3), FIRST, id="saving", marks=pytest.mark.full),
        # of the stage that begins
        pytest.param((prepare, "assemble", 2), FIRST, id="building", marks=pytest.mark.full),
        pytest.param((prepare.resuming, "restore", 1), FIRST, id="loading", marks=pytest.mark.full),
        # at what the stage has come to
        pytest.param((session, "validate", 3), FIRST, id="looking"),
        pytest.param((Session, "tell_stage", 3), SECOND, id="beginning", marks=pytest.mark.full),
    ],
)
def test_a_stop_at_a_border_leaves_what_the_run_goes_on_from_exactly(
    where: tuple[Any, str, int], saved: int, ground: Path, recipe: Recipe, tmp_path: Path
) -> None:
    owner, name, call = where
    original, calls = getattr(owner, name), itertools.count(1)

    def stopping(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, stopping)
        assert run(recipe, tmp_path / "run") == 75
    assert saved_steps(tmp_path / "run")[-1] == saved
    assert events_of(tmp_path / "run", "stop")[-1]["step"] == saved
    assert run(recipe, tmp_path / "run") == 0
    assert events_of(tmp_path / "run", "start")[-1]["resumed_from"] == saved
    assert told(tmp_path / "run") == told(ground / "whole")
    assert equal(weights_of(tmp_path / "run", LAST), weights_of(ground / "whole", LAST))
    assert kinds_of(tmp_path / "run") == STAYING


def test_the_stage_before_is_let_go_of_before_the_next_model_is_built(
    recipe: Recipe, tmp_path: Path
) -> None:
    models: list[weakref.ref[torch.nn.Module]] = []
    alive: list[list[bool]] = []
    assemble = prepare.assemble

    def looking(*args: Any) -> Any:
        alive.append([model() is not None for model in models])
        made = assemble(*args)
        models.extend(weakref.ref(part) for part in made.model.parts)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "assemble", looking)
        assert run(recipe, tmp_path / "run") == 0
    assert alive == [[], [False], [False, False]]


def test_a_bad_step_after_a_border_goes_back_to_it_and_not_across(
    ground: Path, recipe: Recipe, tmp_path: Path
) -> None:
    whole = steps_of(ground / "whole")
    (bad,) = whole[FIRST]["sample_ids"][:1]  # of the first step of the second stage
    at_once = poisoned(recipe, (bad,), Rewind(skip_steps_before=3))
    assert run(at_once, tmp_path / "run") == 0
    (rewind,) = events_of(tmp_path / "run", "rewind")
    assert (rewind["to_step"], rewind["samples"]) == (FIRST, whole[FIRST]["samples"])
    found = steps_of(tmp_path / "run")
    assert found[FIRST - 1] == whole[FIRST - 1]
    # The samples are those that would have come, but for those of the bad step.
    left = whole[FIRST + 1 : SECOND]
    assert [step["sample_ids"] for step in found[FIRST : SECOND - 1]] == [
        step["sample_ids"] for step in left
    ]
    assert found[SECOND]["samples"][0] == whole[SECOND]["samples"][0] + 16  # one step was jumped

    find, calls = CheckpointStore.find, 0

    def damaging(self: CheckpointStore, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:  # of the start, the border and then the bad step
            (tmp_path / f"refused/checkpoints/step-{FIRST:08d}/state.json").write_text("{}")
        return find(self, *args)

    keeping = replace(at_once, checkpoint=replace(recipe.checkpoint, keep_last=9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointStore, "find", damaging)
        with pytest.raises(RunError, match="step 6, is of an earlier stage"):
            run(keeping, tmp_path / "refused")
    assert (calls, events_of(tmp_path / "refused", "stop")[-1]["step"]) == (3, FIRST)


def test_a_bad_step_of_a_later_stage_is_replayed_in_that_stage(
    ground: Path, recipe: Recipe, tmp_path: Path
) -> None:
    (bad,) = steps_of(ground / "whole")[SECOND + 1]["sample_ids"][:1]
    # The first stages have other samples with this id, so it is bad in the last alone.
    sound = replace(poisoned(recipe, (), Stop()), stages=recipe.stages)
    stopping = with_stage(sound, 2, set=(*LONGER, f"task.samples={bad}"))
    with pytest.raises(RunError, match=f"at step {SECOND + 2}"):
        run(stopping, tmp_path / "run")
    assert read_replay(tmp_path / "run").step == SECOND + 2
    facts = replay(stopping, tmp_path / "run", step=None, progress=NoProgress())
    assert facts.reproduced and facts.bitwise and facts.begun_at in (SECOND, SECOND + 1)
    for step in saved_steps(tmp_path / "run"):
        if step >= SECOND:
            (tmp_path / "run/checkpoints" / f"step-{step:08d}" / "state.json").unlink()
    with pytest.raises(UserError, match="is of a later stage than the newest checkpoint"):
        replay(stopping, tmp_path / "run", step=None, progress=NoProgress())


def test_a_finished_run_goes_on_with_a_longer_last_stage_or_with_one_more(
    ground: Path, recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of(ground / "whole", tmp_path / "run", LAST)
    before = (folder / "events.jsonl").read_bytes()
    assert run(recipe, folder) == 0
    assert "as --stages.2.steps, goes on from there" in capsys.readouterr().err
    assert (folder / "events.jsonl").read_bytes() == before

    longer = with_stage(recipe, 2, steps=LENGTHS[2] + 2)
    assert run(longer, folder) == 0
    assert [step["step"] for step in steps_of(folder)[LAST:]] == [LAST + 1, LAST + 2]
    assert steps_of(folder)[LAST]["samples"][0] == steps_of(folder)[LAST - 1]["samples"][1]
    more = replace(longer, stages=(*longer.stages, Stage(steps=1, set=LONGER)))
    assert run(more, folder) == 0
    last = steps_of(folder)[-1]
    assert (last["step"], events_of(folder, "stage")[-1]["name"]) == (LAST + 3, "3")
    with pytest.raises(UserError, match="beyond the budget") as error:
        run(recipe, folder)
    assert error.value.problems[0].fix == f"--stages.2.steps {LENGTHS[2] + 3}"


@pytest.mark.full
def test_a_run_that_had_no_stages_is_the_first_of_one_that_has(
    ground: Path, recipe: Recipe, tmp_path: Path
) -> None:
    budget = replace(recipe.budget, steps=FIRST)
    assert run(replace(recipe, stages=(), budget=budget), tmp_path / "run") == 0
    own = ("schedule.warmup_steps=0",)  # else the schedule of the first stage would be another
    first, second = (replace(stage, set=(*stage.set, *own)) for stage in recipe.stages[:2])
    assert run(replace(recipe, stages=(first, second)), tmp_path / "run") == 0
    found, whole = steps_of(tmp_path / "run"), steps_of(ground / "whole")
    assert [one["sample_ids"] for one in found] == [one["sample_ids"] for one in whole[:SECOND]]


def test_what_lies_behind_a_border_cannot_be_changed_any_more(
    ground: Path, recipe: Recipe, tmp_path: Path
) -> None:
    folder = copy_of(ground / "whole", tmp_path / "run", SECOND)
    before = (folder / "events.jsonl").read_bytes()
    other_mixture = with_stage(recipe, 0, set=("data.corpus.parts.0.weight=2",))
    for changed in (other_mixture, with_stage(recipe, 0, steps=FIRST + 1, name="")):
        with pytest.raises(UserError, match=r"trained on other data|at steps 8, and those"):
            run(changed, folder)
    fewer = replace(recipe, stages=(replace(recipe.stages[0], steps=LAST),))
    with pytest.raises(UserError, match="at steps 8, and those of this recipe are at steps none"):
        run(fewer, folder)
    assert (folder / "events.jsonl").read_bytes() == before
    assert run(with_stage(recipe, 2, steps=1), folder) == 0, "what lies ahead may be"


def test_what_a_later_stage_cannot_do_is_refused_before_the_first_step(
    recipe: Recipe, tmp_path: Path
) -> None:
    too_long = ("budget.seq_len=16384", "budget.batch_tokens=16384", "model.max_seq_len=16384")
    packed = ("data.packing=concatenate", *too_long)
    other_heads = ("model.n_kv_heads=4", "model.head_dim=6")  # as many parameters in all
    lines = [json.dumps({"id": str(number), "text": "zq " * 40}) for number in range(60)]
    (tmp_path / "other.jsonl").write_text("\n".join(lines))
    other_text = ("data.corpus=jsonl", f"data.corpus.files={tmp_path / 'other.jsonl'}")
    learned = replace(recipe, data=replace(recipe.data, tokenizer=Bpe(vocab_size=260)))
    for changed, leaves, words in (
        (recipe, packed, "too few for one sample of budget.seq_len = 16384"),
        (recipe, other_heads, "the state of stage short does not fit: layers.0.attention.query"),
        (learned, other_text, "its tokenizer is not that of the first stage"),
    ):
        with pytest.raises(UserError, match=words):
            run(with_stage(changed, 1, set=leaves), tmp_path / "run")
    assert not (tmp_path / "run" / "events.jsonl").exists()


def test_a_checkpoint_is_loaded_with_the_recipe_of_its_stage(ground: Path) -> None:
    device = torch.device("cpu")
    thetas = [
        load_trained(ground / "whole", step=step, device=device).recipe.model.rope_theta
        for step in (FIRST, SECOND, LAST)
    ]
    assert thetas == [500_000.0, 500_000.0, 2e6]


def test_rows_of_another_length_are_compiled_as_in_a_new_process() -> None:
    dynamic: list[bool] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        dynamic.append(any(isinstance(each, torch.SymInt) for each in inputs))
        return graph.forward

    def call(length: int) -> None:
        torch.compile(_plus_one, backend=backend)(torch.zeros(length))

    call(4)
    call(8)
    assert dynamic == [False, True], "what a border has to keep from happening"
    call(4)
    forget_compiled(Compile(enabled=True))
    call(8)
    assert dynamic[2:] == [False]


def _plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


MESHES = (("parallel.dp_shard=2", "parallel.tp=1"), ("parallel.dp_shard=1", "parallel.tp=2"))


def across_meshes(folder: str) -> None:
    """The test below, as each rank runs it."""
    torch.set_num_threads(1)
    recipe = staged_recipe(Path(folder))
    for index in (0, 1, 2):
        stage = recipe.stages[index]
        recipe = with_stage(recipe, index, set=(*stage.set, *MESHES[index % 2]))
    recipe = replace(recipe, parallel=Parallel(device="cpu"))
    assert run(recipe, Path(folder) / "meshes") == 0


def test_a_stage_may_have_another_mesh(ground: Path) -> None:
    run_ranks(across_meshes, 2, str(ground))
    found, whole = steps_of(ground / "meshes"), steps_of(ground / "whole")
    assert [step["sample_ids"] for step in found] == [step["sample_ids"] for step in whole]
    losses = [step["loss"] for step in found]
    assert losses == pytest.approx([step["loss"] for step in whole], rel=1e-5)
    meshes = [event["mesh"] for event in events_of(ground / "meshes", "stage")]
    assert [(mesh["dp_shard"], mesh["tp"]) for mesh in meshes] == [(2, 1), (1, 2), (2, 1)]
