"""Replica groups that come and go, as whole runs."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from armillary.foundation.errors import EXIT_RUN_ME_AGAIN
from armillary.parallel.replicas import Replicas
from armillary.recipe.problems import problems
from reliability.agents import write_slow_recipe
from reliability.replicas import Groups, trial
from reliability.zygote import Zygote
from tiny_runs import steps_of, tiny_recipe, write_corpus


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """Starts commands without importing torch for each."""
    with Zygote() as zygote:
        yield zygote


def test_a_group_that_is_killed_costs_at_most_the_step_in_flight(
    zygote: Zygote, tmp_path: Path
) -> None:
    outcome = trial(zygote, tmp_path, steps=40, kills=1)
    assert [loss.repeated for loss in outcome.losses] in ([0], [1]), outcome
    assert outcome.restarts == 0 and outcome.whole, outcome
    assert outcome.same_samples and outcome.equal_ends, outcome
    assert outcome.loss_deviation < 1e-5, outcome


@pytest.mark.parametrize("mode", [pytest.param("local-sgd", marks=pytest.mark.full), "diloco"])
def test_rounds_end_with_the_same_weights_in_all_groups_also_after_one_was_lost(
    mode: str, zygote: Zygote, tmp_path: Path
) -> None:
    write_corpus(tmp_path)
    write_slow_recipe(tmp_path / "slow.py", steps=50, seconds=0.05)
    options = ("--replicas.mode", mode, "--replicas.mode.every", "5", "--checkpoint.every", "4")
    with Groups(zygote, tmp_path, options, nproc=1) as groups:
        groups.start(0)
        groups.start(1)
        groups.until(lambda: groups.members(0) == groups.members(1) == "0, 1", "meeting")
        begun = groups.step(0)
        groups.until(lambda: groups.step(0) >= begun + 7, "a round")
        groups.kill(0)
        groups.until(lambda: groups.members(1) == "1", "going on alone")
        groups.start(0)
        groups.until(lambda: groups.members(1) == "0, 1", "coming back")
        assert groups.wait(0) == groups.wait(1) == [0]
        final = [groups.events(group, "validation")[-1] for group in (0, 1)]
        assert final[0]["name"] == "final-validation"
        assert final[0]["loss"] == final[1]["loss"]
        last = [groups.events(group, "step")[-1] for group in (0, 1)]
        assert last[0]["loss"] != last[1]["loss"], "both trained on the same share"
        assert last[0]["samples"] == last[1]["samples"]


@pytest.mark.full
def test_a_stopped_group_saves_and_the_other_goes_on_without_it(
    zygote: Zygote, tmp_path: Path
) -> None:
    write_corpus(tmp_path)
    write_slow_recipe(tmp_path / "slow.py", steps=40, seconds=0.05)
    with Groups(zygote, tmp_path, nproc=1) as groups:
        groups.start(0)
        groups.start(1)
        groups.until(lambda: groups.members(0) == groups.members(1) == "0, 1", "meeting")
        groups.until(lambda: groups.step(0) >= 3, "three steps")
        groups.running[0][0].send(signal.SIGTERM)
        assert groups.wait(0) == [EXIT_RUN_ME_AGAIN]
        (saved,) = (groups.run(0) / "checkpoints").glob("step-*/manifest.json")
        assert json.loads(saved.read_text())["step"] == groups.step(0)
        assert groups.wait(1) == [0]
        assert [step["step"] for step in steps_of(groups.run(1))] == list(
            range(steps_of(groups.run(1))[0]["step"], 41)
        )


@pytest.mark.full
def test_a_group_that_trains_something_else_leaves_and_the_others_go_on(
    zygote: Zygote, tmp_path: Path
) -> None:
    write_corpus(tmp_path)
    write_slow_recipe(tmp_path / "slow.py", steps=30, seconds=0.1)
    with Groups(zygote, tmp_path, nproc=1) as groups:
        groups.start(0)
        groups.until(lambda: groups.step(0) >= 2, "two steps")
        groups.start(1, "--optimizer.lr", "0.5")
        assert groups.wait(1) == [1]
        said = (tmp_path / "group-1.txt.0").read_text()
        assert "group 0 at this lighthouse trains something else" in said
        assert groups.wait(0) == [0]
        assert [step["step"] for step in steps_of(groups.run(0))] == list(range(1, 31))


@pytest.mark.parametrize(
    ("replicas", "told"),
    [
        (Replicas(groups=2), "replicas.lighthouse is empty"),
        (Replicas(groups=2, group=2, lighthouse="h:1"), "group = 2 is none of replicas.groups"),
        (Replicas(lighthouse="nowhere"), "is no address"),
        (Replicas(lighthouse="user:secret@h:1"), "is no address"),
        (Replicas(groups=3, lighthouse="h:1"), "cannot share evenly"),
        (Replicas(lighthouse="h:1", timeout_seconds=400), "counts as a hang"),
    ],
)
def test_groups_that_cannot_work_are_refused(replicas: Replicas, told: str, tmp_path: Path) -> None:
    write_corpus(tmp_path)
    recipe = replace(tiny_recipe(tmp_path, steps=4), replicas=replicas)
    assert told in "\n".join(problem.message for problem in problems(recipe))
