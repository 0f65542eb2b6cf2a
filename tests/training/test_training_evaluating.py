"""Evaluation in the midst of a run: the figures of live weights, which nothing else hears of."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from armillary.checkpoint.config import Checkpoint
from armillary.checkpoint.ranks import Ranks
from armillary.cli.main import main
from armillary.data.config import JsonLines
from armillary.evaluation.bits_per_byte import BitsPerByte
from armillary.evaluation.cloze import Cloze
from armillary.evaluation.config import Evaluation, EvaluationTask
from armillary.evaluation.items import Encoder, Likelihood, Measured, Request
from armillary.evaluation.multiple_choice import MultipleChoice
from armillary.foundation.component import component
from armillary.foundation.progress import NoProgress
from armillary.inference import scoring
from armillary.inference.evaluate import Answered, Evaluator
from armillary.inference.served import served
from armillary.parallel.config import Parallel
from armillary.recipe.overrides import Option
from armillary.recipe.problems import problems
from armillary.recipe.recipe import Recipe
from armillary.training.assembly import open_data
from armillary.training.train import train
from ranks import run_ranks
from tiny_runs import events_of, steps_of, tiny_recipe, write_corpus

TASKS = (MultipleChoice(), Cloze(), BitsPerByte())
STEPS = 8


@component("failing")
@dataclass(frozen=True, kw_only=True, slots=True)
class Failing(EvaluationTask):
    """Fails where it is told to."""

    name: str = "failing"
    limit: int = 0
    where: str = "prepare"

    def prepare(self, encoder: Encoder) -> _Prepared:
        if self.where == "prepare":
            raise KeyError("no such item")
        unknown = 10**6 if self.where == "score" else 5  # no row of the embedding
        return _Prepared(self.where, (Request((1,), (2, unknown)),) * 30)


@dataclass(frozen=True, slots=True)
class _Prepared:
    where: str
    requests: tuple[Request, ...]

    def measure(self, answers: Sequence[Likelihood]) -> Measured:
        raise ZeroDivisionError("no items")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("evaluating")
    write_corpus(folder)
    return folder


def evaluated(folder: Path, *tasks: EvaluationTask, every: int = 3, **changes: Any) -> Recipe:
    recipe = tiny_recipe(folder, steps=STEPS, **changes)
    return replace(recipe, evaluation=Evaluation(every=every, tasks=tasks or TASKS))


def figures(run: Path, step: int) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for event in events_of(run, "evaluation"):
        if event["step"] == step:
            found.setdefault(event["task"], {})[event["metric"]] = event["value"]
    return found


def offline(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, float]]:
    assert main(["eval", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return {name: task["metrics"] for name, task in found["tasks"].items()}


def test_a_run_is_evaluated_on_the_way_and_at_its_end_and_shown(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder / "alone"
    assert train(evaluated(folder), name="tiny", folder=run) == 0
    assert [set(figures(run, step)) for step in (3, 6, STEPS)] == [{t.name for t in TASKS}] * 3
    assert len(events_of(run, "evaluation")) == 3 * 8
    assert figures(run, 3) != figures(run, 6)
    capsys.readouterr()
    assert main(["runs", "show", str(run)]) == 0
    shown = capsys.readouterr().out
    assert f"cloze at step {STEPS}: accuracy 0.0000, nats " in shown
    assert main(["runs", "show", str(run), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["evaluations"]) == 24


def test_training_is_the_same_to_the_last_bit_with_evaluation_and_without(folder: Path) -> None:
    run, plain = folder / "with", folder / "without"
    recipe = evaluated(folder, *TASKS, Failing(where="score"), every=1)
    recipe = replace(recipe, checkpoint=Checkpoint(every=4))
    assert train(recipe, name="tiny", folder=run) == 0
    assert train(replace(recipe, evaluation=Evaluation()), name="tiny", folder=plain) == 0
    assert steps_of(run) == steps_of(plain)
    assert len(events_of(run, "warning")) == STEPS
    again = folder / "again"
    at = str(run / "checkpoints" / "step-00000004")
    assert train(recipe, name="tiny", folder=again, resume=at) == 0
    assert steps_of(again) == steps_of(plain)[4:]
    assert figures(again, STEPS) == figures(run, STEPS)


def test_bits_per_byte_of_the_held_out_documents_are_those_of_validation(folder: Path) -> None:
    run = folder / "held-out"
    recipe = evaluated(folder)
    recipe = replace(recipe, data=replace(recipe.data, validation_fraction=0.5))
    held_out = folder / "held-out.jsonl"
    lines = [json.dumps({"text": text}) + "\n" for text in _held_out(recipe)]
    held_out.write_text("".join(lines))
    task = BitsPerByte(name="same", corpus=JsonLines(files=(str(held_out),)))
    recipe = replace(recipe, evaluation=Evaluation(tasks=(task,)))
    assert train(recipe, name="tiny", folder=run) == 0
    (validation,) = events_of(run, "validation")[-1:]
    found = figures(run, STEPS)["same"]
    assert found["bits_per_byte"] == pytest.approx(validation["bits_per_byte"], rel=1e-6)
    assert found["loss"] == pytest.approx(validation["loss"], rel=1e-6)


def _held_out(recipe: Recipe) -> list[str]:
    """The texts that a run holds out."""
    with closing(Ranks()) as ranks:
        store = open_data(recipe, NoProgress(), ranks).store
    return [bytes(text).decode() for text in store.validation[0].documents_bytes()]


def test_tasks_that_raise_are_warnings_and_the_others_are_asked(folder: Path) -> None:
    run = folder / "raises"
    words = {
        "prepare": "KeyError: 'no such item'",
        "score": "no token 1000000",
        "measure": "ZeroDivisionError: no items",
    }
    failing = [Failing(name=where, where=where) for where in words]
    assert train(evaluated(folder, *failing, Cloze(limit=2)), name="tiny", folder=run) == 0
    warnings = [event["message"] for event in events_of(run, "warning")]
    assert len(warnings) == 3 * len(words)
    for warning, where in zip(warnings, [*words] * 3, strict=True):
        assert warning.startswith(f"evaluation {where} failed: ")
        assert words[where] in warning
    assert set(figures(run, STEPS)) == {"cloze"}


def test_a_file_that_breaks_during_the_run_is_a_warning(folder: Path) -> None:
    run, items = folder / "breaks", folder / "items.jsonl"
    items.write_text('{"text": "one two"}\n')
    recipe = evaluated(folder, Cloze(files=(str(items),)))
    assert problems(recipe) == []
    items.write_text('{"text": "one"}\n')
    assert train(recipe, name="tiny", folder=run) == 0
    (message, *_) = [event["message"] for event in events_of(run, "warning")]
    assert message == f"evaluation cloze failed: {items}:1: no context or no target"
    missing = replace(recipe, evaluation=Evaluation(tasks=(Cloze(files=("nowhere.jsonl",)),)))
    assert [problem.message for problem in problems(missing)] == [
        f"evaluation.tasks.0.files: nowhere.jsonl is not a file (looked for from {Path.cwd()})"
    ]


def test_a_stop_is_heard_in_an_evaluation_which_is_then_made_up_for(folder: Path) -> None:
    run, whole = folder / "stopped", folder / "not-stopped"
    texts = folder / "many.jsonl"
    texts.write_text('{"text": "one two three four"}\n' * 40_000)
    recipe = evaluated(folder, Cloze(files=(str(texts),), limit=40_000), every=4)
    small = replace(recipe.evaluation, tokens_at_once=32)
    stopped = replace(recipe, evaluation=small)

    def ask() -> None:
        while not (run / "events.jsonl").exists() or len(events_of(run, "step")) < 4:
            threading.Event().wait(0.02)
        threading.Event().wait(0.3)
        signal.raise_signal(signal.SIGTERM)

    asker = threading.Thread(target=ask)
    asker.start()
    code = train(stopped, name="tiny", folder=run)
    asker.join()
    assert code == 75
    assert events_of(run, "evaluation") == []
    few = replace(recipe, evaluation=replace(recipe.evaluation, tasks=(Cloze(limit=2),)))
    assert train(few, name="tiny", folder=run) == 0
    assert train(few, name="tiny", folder=whole) == 0
    assert figures(run, 4) == figures(whole, 4)
    assert [each["loss"] for each in steps_of(run)] == [each["loss"] for each in steps_of(whole)]


def test_the_checkpoint_with_the_best_score_of_a_task_is_kept(folder: Path) -> None:
    run = folder / "best"
    recipe = evaluated(folder, Cloze(), every=2)
    saves = Checkpoint(every=2, keep_last=1, keep_best=1, best_metric="cloze")
    recipe = replace(recipe, checkpoint=saves)
    assert problems(recipe) == []
    assert train(recipe, name="tiny", folder=run) == 0
    nats = {step: figures(run, step)["cloze"]["nats"] for step in (2, 4, 6)}
    best = min(nats, key=nats.__getitem__)
    kept = {int(path.name[5:]) for path in (run / "checkpoints").iterdir()}
    assert kept == {best, STEPS}
    manifest = json.loads((run / f"checkpoints/step-{best:08}/manifest.json").read_text())
    assert manifest["scores"] == {"cloze": nats[best]}
    never = replace(recipe, evaluation=replace(recipe.evaluation, every=0))
    assert "with evaluation.every = 0" in problems(never)[0].message


class _Planted(RuntimeError):
    """What a rank raises where no other does."""


def _fail_on_rank_1() -> None:
    """Has the forward pass of evaluations fail on rank 1, in its second block."""
    real = scoring.Scorer._values

    def values(self: Any, *args: Any) -> Any:
        if dist.get_rank() == 1:
            raise _Planted("out of memory")
        return real(self, *args)

    scoring.Scorer._values = values  # type: ignore[method-assign]


def train_both(folder: str, parallel: Parallel, plant: bool) -> list[int]:
    torch.set_num_threads(1)
    if plant:
        _fail_on_rank_1()
    recipe = evaluated(Path(folder), parallel=parallel)
    return [train(recipe, name="tiny", folder=Path(folder) / f"spread-{plant}")]


@pytest.mark.full
def test_in_the_loop_on_a_mesh_as_offline_on_it_and_on_one_rank(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parallel = Parallel(dp_shard=2, tp=2)
    assert run_ranks(train_both, 4, str(folder), parallel, False) == [[0]] * 4
    run = folder / "spread-False"
    live = figures(run, STEPS)
    assert set(live) == {task.name for task in TASKS}
    capsys.readouterr()
    alone = offline(capsys, str(run))
    for task, metrics in live.items():
        for metric, value in metrics.items():
            if metric.startswith("accuracy"):
                assert alone[task][metric] == value
            assert alone[task][metric] == pytest.approx(value, rel=1e-6)
    again = run_ranks(ask_offline, 4, str(run), parallel)
    assert again == [live] * 4


def ask_offline(run: str, parallel: Parallel) -> dict[str, dict[str, float]]:
    """As `armillary eval` does in each rank."""
    torch.set_num_threads(1)
    options = [Option("parallel.tp", str(parallel.tp))]
    found = {}
    with served(Path(run), options, progress=NoProgress()) as trained:
        evaluator = Evaluator.of(
            trained.recipe, trained.model, trained.tokenizer,
            ranks=trained.ranks, sums=trained.sums, progress=NoProgress(),
        )  # fmt: skip
        for task in TASKS:
            answer = evaluator.run(task)
            assert isinstance(answer, Answered)
            found[task.name] = {m.name: m.value for m in answer.measured.metrics}
    return found


def test_one_rank_of_several_that_fails_is_a_warning_and_training_goes_on(folder: Path) -> None:
    parallel = Parallel(dp_shard=2)
    assert run_ranks(train_both, 2, str(folder), parallel, True) == [[0]] * 2
    run = folder / "spread-True"
    messages = {event["message"] for event in events_of(run, "warning")}
    assert messages == {
        f"evaluation {task.name} failed: rank 1: _Planted: out of memory" for task in TASKS
    }
    assert len(steps_of(run)) == STEPS
