"""Plans: order, budgets, going on where an earlier start was cut short."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from comparison_examples import STEPS, with_rate, write_run

from armillary.analysis.carrying_out import checkpoint_bytes, contenders_in, train_all
from armillary.analysis.plan import (
    Entry,
    Limit,
    Plan,
    entries_of,
    limited,
    probing,
    read_plan,
    speed_sign,
    steps_within,
)
from armillary.cli.main import main
from armillary.data.config import Data
from armillary.foundation.errors import RunError, Stopped, UserError
from armillary.launch import local
from armillary.optim.muon import Muon
from armillary.recipe.recipe import Recipe
from armillary.recipe.registry import get
from armillary.recipe.stages import Stage
from armillary.recipe.toml import to_toml
from tiny_runs import tiny_recipe, write_corpus


def entries() -> tuple[Entry, ...]:
    return entries_of(["debug", "debug"], [with_rate(1e-3), with_rate(2e-3)])


def plan_in(folder: Path, **changes: Any) -> Plan:
    fields: dict[str, Any] = {"entries": entries(), "seeds": 2, "limit": Limit(), "nproc": 1}
    return Plan(folder=folder, **(fields | changes))


class Trainer:
    """Writes a run's events instead of training; ends as it is told to."""

    def __init__(self, *codes: int, steps: bool = True) -> None:
        self.codes, self.steps = list(codes), steps
        self.trained: list[str] = []

    def __call__(self, argv: list[str], nproc: int) -> local.Ended:
        folder, seed = Path(argv[3]), int(argv[5])
        code = self.codes.pop(0) if self.codes else 0
        self.trained.append("/".join(folder.parts[-2:]))
        if self.steps and not folder.exists():
            write_run(folder, seed=seed, bits=2.0 + 0.1 * seed, exit_code=code)
        return local.Ended(code, reason="died" if code else "")


def test_recipes_take_turns_and_each_is_first_in_its_turn(tmp_path: Path) -> None:
    trainer = Trainer()
    plan = plan_in(tmp_path / "out", seeds=3)
    plan.save()
    train_all(plan, trainer, print)
    assert trainer.trained == [
        "A/seed-0", "B/seed-0", "B/seed-1", "A/seed-1", "A/seed-2", "B/seed-2",
    ]  # fmt: skip
    assert [each.name for each in contenders_in(plan)] == ["debug lr=0.001", "debug lr=0.002"]


def test_what_has_ended_is_not_trained_again(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    plan.folder = tmp_path / "out"
    plan.save()
    with pytest.raises(Stopped):
        train_all(plan, Trainer(0, 75), print)
    again = plan_in(tmp_path / "out")
    again.load_progress()
    trainer = Trainer()
    train_all(again, trainer, print)
    assert trainer.trained == ["B/seed-0", "B/seed-1", "A/seed-1"]


def test_a_failed_run_counts_as_one_until_it_is_asked_for_again(tmp_path: Path) -> None:
    plan = plan_in(tmp_path / "out")
    plan.save()
    train_all(plan, Trainer(0, 1), print)
    assert [run.outcome for run in contenders_in(plan)[1].runs] == ["failed", "finished"]
    trainer = Trainer()
    train_all(plan, trainer, print)
    assert trainer.trained == []
    train_all(plan, trainer, print, again_failed=True)
    assert trainer.trained == ["B/seed-0"]


def test_a_run_that_never_began_ends_the_comparison(tmp_path: Path) -> None:
    plan = plan_in(tmp_path / "out")
    plan.save()
    with pytest.raises(RunError, match="could not be trained: died"):
        train_all(plan, Trainer(1, steps=False), print)


def test_another_comparison_in_the_folder_and_broken_plans_are_refused(tmp_path: Path) -> None:
    plan_in(tmp_path / "out").save()
    with pytest.raises(UserError, match="another comparison: its seeds differs"):
        plan_in(tmp_path / "out", seeds=5).load_progress()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").touch()
    with pytest.raises(UserError, match="not empty"):
        plan_in(tmp_path / "full").load_progress()
    good = json.loads((tmp_path / "out" / "plan.json").read_text())
    for broken in (b"", b"{", b"[]", b'{"version": 1}', b"\xff"):
        (tmp_path / "plan.json").write_bytes(broken)
        with pytest.raises(UserError):
            read_plan(tmp_path / "plan.json")
    for ended in ({"../../etc": 0}, {"A/seed-x": 0}, {"Z/seed-1": 0}, {"A/seed-1": "0"}):
        (tmp_path / "plan.json").write_text(json.dumps(good | {"ended": ended}))
        with pytest.raises(UserError):
            read_plan(tmp_path / "plan.json")


def test_a_budget_of_tokens_replaces_the_recipes_own_and_adds_looks() -> None:
    recipe = limited(get("debug"), Limit(unit="tokens", amount=2048 * 50))
    assert (recipe.total_steps, recipe.budget.steps) == (50, None)
    assert recipe.validation.every == 5
    assert limited(get("debug"), Limit()).budget == get("debug").budget


def test_flops_and_seconds_become_whole_steps() -> None:
    probe = {"flops_per_token": 1e6, "step_seconds": 0.25}
    assert steps_within(Limit(unit="flops", amount=1e12), 2048, probe) == round(1e6 / 2048)
    assert steps_within(Limit(unit="seconds", amount=60.0), 2048, probe) == 240
    assert steps_within(Limit(unit="seconds", amount=0.01), 2048, probe) == 1
    assert limited(get("debug"), Limit(unit="seconds", amount=60.0), probe).budget.steps == 240


def test_a_probe_is_short_and_ends_without_ceremony() -> None:
    recipe = probing(get("starter"))
    assert recipe.total_steps < 20
    assert recipe.sampling.prompts == ()
    assert recipe.validation.final_sequences == 1


def test_a_probe_needs_no_room_for_the_runs_warm_up() -> None:
    slow = replace(get("debug"), schedule=replace(get("debug").schedule, warmup_steps=2_000))
    probe = probing(slow)
    assert probe.schedule.problems(probe.total_steps) == []


def test_recipes_that_differ_in_rates_alone_share_a_probe() -> None:
    debug = get("debug")
    signs = {speed_sign(with_rate(rate)) for rate in (1e-3, 2e-3)}
    assert signs == {speed_sign(replace(debug, seed=3, max_gradient_norm=2.0))}
    deeper = replace(debug, model=replace(debug.model, n_layers=9))
    assert speed_sign(deeper) not in signs
    assert speed_sign(replace(debug, optimizer=Muon())) not in signs


def test_thinning_deletes_checkpoints_of_finished_runs_alone(tmp_path: Path) -> None:
    plan = plan_in(tmp_path / "out", seeds=1)
    plan.save()
    train_all(plan, Trainer(0, 1), print)
    for task in plan.tasks():
        (plan.run_folder(task) / "checkpoints").mkdir()
        (plan.run_folder(task) / "checkpoints" / "weights").write_bytes(b"12345")
    assert checkpoint_bytes(plan) == 10
    train_all(plan, Trainer(), print, thin=True)
    assert checkpoint_bytes(plan) == 5
    assert not (tmp_path / "out/runs/A/seed-0/checkpoints").exists()


def test_a_budget_over_stages_is_refused() -> None:
    staged = replace(get("debug"), stages=(Stage(name="only", steps=5),))
    with pytest.raises(UserError, match="stages"):
        limited(staged, Limit(unit="tokens", amount=1e6))
    with pytest.raises(UserError, match="stages"):
        probing(staged)


@pytest.fixture
def trains_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Runs of the command are trained in this process; returns what was asked for."""
    asked: list[list[str]] = []

    def run_once(argv: Sequence[str], nproc: int, *, signals: object) -> local.Ended:
        asked.append(list(argv))
        return local.Ended(main(list(argv)))

    monkeypatch.setattr(local, "run_once", run_once)
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    (tmp_path / "tiny.toml").write_text(to_toml(tiny(tmp_path)))
    return asked


def tiny(folder: Path) -> Recipe:
    recipe = tiny_recipe(folder, steps=6)
    assert isinstance(recipe.data, Data)
    return replace(recipe, seed=0, validation=replace(recipe.validation, every=2))


def test_the_command_trains_compares_and_shows_and_then_only_shows(
    tmp_path: Path, trains_here: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "--budget.tokens", "4096", "tiny.toml", "tiny.toml",
             "--optimizer.lr", "3e-2", "--seeds", "2", "--out", "out"]  # fmt: skip
    assert main([*words, "--json"]) == 0, capsys.readouterr().err
    document = json.loads(capsys.readouterr().out)
    assert len(trains_here) == 4
    assert [each["name"] for each in document["recipes"]] == ["tiny lr=0.001", "tiny lr=0.03"]
    assert document["pairs"][0]["test"] == "paired t"
    runs = [run for recipe in document["recipes"] for run in recipe["runs"]]
    assert [run["outcome"] for run in runs] == ["finished"] * 4
    assert {run["steps"] for run in runs} == {8}
    assert (tmp_path / "out" / "compare.html").stat().st_size > 10_000
    assert main([*words]) == 0
    assert len(trains_here) == 4
    assert capsys.readouterr().out.startswith("verdict: ")
    assert main(["compare", "out", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["verdict"] == document["verdict"]
    assert [each["name"] for each in again["recipes"]] == ["tiny lr=0.001", "tiny lr=0.03"]


def test_a_budget_of_flops_is_probed_and_spent(
    tmp_path: Path, trains_here: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tiny.toml", "tiny.toml", "--model.n-layers", "1", "--seeds", "1", "--out", "out"]
    assert main(["compare", *words, "--budget.flops", "5e8", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    large, small = (recipe["runs"][0] for recipe in document["recipes"])
    assert large["steps"] < small["steps"]
    for run in (large, small):
        spent = run["flops_per_token"] * run["steps"] * 512
        assert spent == pytest.approx(5e8, rel=0.5 / run["steps"] + 1e-9)
    assert document["verdict"]["kind"] == "cannot be told"


def test_an_interrupted_comparison_says_how_far_it_is_and_what_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = plan_in(Path("out"), command="armillary compare a b --out out")
    plan.save()
    for done, code in ((0, 2), (1, 2), (2, 0)):
        assert main(["compare", "out"]) == code
        told = capsys.readouterr().err
        assert f"the comparison out is not through: {done} of 4 runs are done" in told
        assert "armillary compare a b --out out" in told
        assert "nothing to compare" not in told
        if done < 2:
            task = plan.tasks()[done]
            recipe = task.entry.recipe
            write_run(plan.run_folder(task), seed=task.seed, bits=2.0, recipe=recipe)
            plan.ended[task.name] = 0
            plan.save()


def test_a_folder_that_cannot_be_written_is_told_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert main(["compare", "debug", "debug", "--optimizer.lr", "1e-3", "--out", "file/z"]) == 2
    assert "error: --out file/z: cannot be used: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to compare"),
        (["debug"], "one recipe"),
        (["debug", "debug", "--seeds", "0"], "--seeds 0"),
        (["debug", "debug", "--budget.tokens", "x"], "--budget.tokens x"),
        (["debug", "debug", "--budget.tokens", "1e6", "--budget.steps", "5"], "two budgets"),
        (["debug", "debug", "--random", "3"], "of no sweep"),
        (["debug", "--sweep", "optimizer.lr"], "is no sweep"),
        (["debug", "debug", "--optimizer.lr", "-1"], "lr"),
        (["debug", "no-such-recipe"], "there is no recipe"),
        (["--html", "debug", "debug", "debug", "--seed", "9"], "--html=compare.html"),
        (["debug", "debug", "--target-loss", "nan"], "--target-loss nan"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_starts(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *words]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert said in told
    assert list(tmp_path.iterdir()) == []


def test_a_finished_run_is_compared_with_its_events_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, rate, bits in (("one", 1e-3, 2.0), ("two", 2e-3, 2.5)):
        for seed in range(2):
            run = tmp_path / "runs" / f"{name}-{seed}"
            write_run(run, seed=seed, bits=bits + 0.01 * seed, recipe=with_rate(rate))
    names = ["one-0", "one-1", "two-0", "two-1"]
    assert main(["compare", *names, "--html", "page.html"]) == 0
    assert "A is better by 0.5" in capsys.readouterr().out
    assert f"{STEPS}" in (tmp_path / "page.html").read_text()
