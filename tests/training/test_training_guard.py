"""A step that would poison a run: what each policy does, on all ranks, and that it can be repeated.

One sample makes the loss not a number, on the one rank that reads it.
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from guarded_runs import (
    BAD,
    SEQUENCES,
    STEPS,
    equal,
    lagging,
    measured,
    poisoned,
    recipe_in,
    run,
    saved_steps,
    saving_every_step,
    weights_of,
)

from armillary.checkpoint.config import Checkpoint
from armillary.checkpoint.places.local import LocalPlace
from armillary.foundation.errors import RunError, UserError
from armillary.optim.muon import Muon
from armillary.recipe.problems import problems
from armillary.recipe.recipe import Recipe
from armillary.resilience.guard_config import Rewind, Skip, Stop
from armillary.resilience.guard_dump import dump_folder, read_replay
from armillary.telemetry.history import read_history
from armillary.training import resume
from armillary.training.session import Session
from ranks import run_ranks
from tiny_runs import events_of, steps_of, write_corpus


def each_policy(folder: str, ranks: int, lag: bool) -> None:
    """The test below, as each rank runs it."""
    torch.set_num_threads(1)
    path = Path(folder)
    recipe = recipe_in(path, ranks)
    assert run(recipe, path / "whole") == 0
    bad = tuple(steps_of(path / "whole")[BAD - 1]["sample_ids"][-1:])  # the last rank reads it
    if lag:
        with lagging():
            policies(path, recipe, bad)
    else:
        policies(path, recipe, bad)


def policies(path: Path, recipe: Recipe, bad: tuple[int, ...]) -> None:
    oracle = measured(path / "whole")

    with pytest.raises(RunError, match=f"loss nan and gradient norm nan at step {BAD}") as error:
        run(poisoned(recipe, bad, Stop()), path / "stop")
    assert f"those of step {BAD - 1}, which is saved" in str(error.value)
    assert "gradients not finite: embedding.weight" in str(error.value)
    assert error.value.exit_code == 1 and error.value.seen_by_every_rank
    assert measured(path / "stop") == oracle[: BAD - 1]
    assert saved_steps(path / "stop") == [2, 4]
    assert equal(weights_of(path / "stop", 4), weights_of(path / "whole", 4))
    assert events_of(path / "stop")[-1]["exit_code"] == 1

    assert run(poisoned(recipe, bad, Skip()), path / "skip") == 0
    skipped = [event for event in events_of(path / "skip", "step") if event.get("skipped")]
    assert [event["step"] for event in skipped] == [BAD]
    assert skipped[0]["nonfinite"]["loss"] == "nan"
    found = measured(path / "skip")
    assert [one[:2] for one in found] == [one[:2] for one in oracle]  # order and count as ever
    assert found[BAD][2] != oracle[BAD][2]
    (warning,) = (e for e in events_of(path / "skip", "warning") if e["where"] == "guard")
    assert f"step {BAD}, samples [64, 80)" in warning["message"]
    assert f"--step {BAD}" in warning["hint"]

    assert run(poisoned(recipe, bad, Rewind(skip_steps_before=1)), path / "rewind") == 0
    (rewind,) = events_of(path / "rewind", "rewind")
    assert (rewind["to_step"], rewind["samples"], rewind["rewinds"]) == (4, [64, 80], 1)
    found = measured(path / "rewind")
    assert found[: BAD - 1] == oracle[: BAD - 1]
    after = [[64 + SEQUENCES * index, 80 + SEQUENCES * index] for index in range(1, 6)]
    assert [one[1] for one in found[BAD - 1 :]] == after

    history = read_history(path / "rewind")
    assert [history.steps[step]["samples"] for step in range(BAD, STEPS + 1)] == after

    for name in ("stop", "skip", "rewind"):
        for step in saved_steps(path / name):
            assert all(t.isfinite().all() for t in weights_of(path / name, step).values()), name
        assert read_replay(path / name).step == BAD


@pytest.mark.parametrize("lag", [False, True])
def test_each_policy_does_what_it_says_on_all_ranks(lag: bool, tmp_path: Path) -> None:
    write_corpus(tmp_path)
    run_ranks(each_policy, 2, str(tmp_path), 2, lag)


def test_a_skipped_step_leaves_weights_and_moments_as_they_were_with_and_without_lag(
    tmp_path: Path,
) -> None:
    recipe, bad = saving_every_step(tmp_path)
    for optimizer in (recipe.optimizer, Muon(lr=1e-3)):
        chosen = poisoned(replace(recipe, optimizer=optimizer), bad, Skip())
        name = type(optimizer).__name__
        assert run(chosen, tmp_path / name) == 0
        with lagging():
            assert run(chosen, tmp_path / f"{name}-lag") == 0
        assert steps_of(tmp_path / f"{name}-lag") == steps_of(tmp_path / name)
        for step in range(1, STEPS + 1):
            first = weights_of(tmp_path / name, step)
            assert equal(first, weights_of(tmp_path / f"{name}-lag", step))
            assert equal(first, weights_of(tmp_path / name, step - 1)) == (step == BAD) or step == 1
        total = [event["tokens_total"] for event in events_of(tmp_path / name, "step")]
        assert total[BAD - 1] == total[BAD - 2] < total[BAD]


def test_a_rewound_run_is_the_run_over_the_other_samples_and_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path)
    recipe = recipe_in(tmp_path)
    assert run(recipe, tmp_path / "whole") == 0
    bad = tuple(steps_of(tmp_path / "whole")[index]["sample_ids"][0] for index in (3, 6))
    chosen = poisoned(recipe, bad, Rewind(skip_steps_before=1))
    assert run(chosen, tmp_path / "rewound") == 0
    events = events_of(tmp_path / "rewound", "rewind")
    assert [event["samples"] for event in events] == [[32, 64], [96, 112]]

    def stepping(self: Session, taken: Any) -> None:
        report(self, taken)
        if self.position.step == 6 and self.position.rewinds == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    report = Session._report
    with monkeypatch.context() as patch:
        patch.setattr(Session, "_report", stepping)
        assert run(chosen, tmp_path / "broken") == 75
    assert run(chosen, tmp_path / "broken") == 0
    assert len(events_of(tmp_path / "broken", "rewind")) == 2
    final = {one["step"]: one for one in steps_of(tmp_path / "rewound")}
    assert {one["step"]: one for one in steps_of(tmp_path / "broken")} == final

    begin = resume.begin_anew

    def jumping(assembly: Any) -> Any:
        beginning = begin(assembly)
        beginning.position.jumped = [[32, 64], [96, 112]]
        return beginning

    monkeypatch.setattr(resume, "begin_anew", jumping)
    assert run(recipe, tmp_path / "oracle") == 0
    assert {one["step"]: one for one in steps_of(tmp_path / "oracle")} == final
    last = weights_of(tmp_path / "oracle", STEPS)
    assert equal(last, weights_of(tmp_path / "rewound", STEPS))
    assert equal(last, weights_of(tmp_path / "broken", STEPS))


def test_policies_end_the_run_when_they_have_done_all_they_may(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    recipe = recipe_in(tmp_path)
    assert run(recipe, tmp_path / "whole") == 0
    ids = [step["sample_ids"][0] for step in steps_of(tmp_path / "whole")]
    for lag in (False, True):
        run_of = tmp_path / f"skip-{lag}"
        with (
            pytest.raises(RunError, match="3 in a row"),
            lagging() if lag else nullcontext(),
        ):
            run(poisoned(recipe, tuple(ids[4:8]), Skip(max_in_a_row=2)), run_of)
        assert [e["step"] for e in events_of(run_of, "step") if e.get("skipped")] == [5, 6]
        assert saved_steps(run_of) == [2, 4, 6]
        assert not equal(weights_of(run_of, 6), weights_of(tmp_path / "whole", 6))
    again = poisoned(recipe, tuple(ids[4:6]), Rewind(max_rewinds=1))
    with pytest.raises(RunError, match="gone back 1 times"):
        run(again, tmp_path / "rewind")
    with pytest.raises(RunError, match="no checkpoint yet"):
        run(poisoned(recipe, tuple(ids[:1]), Rewind()), tmp_path / "early")
    assert saved_steps(tmp_path / "early") == []
    found = problems(replace(again, checkpoint=Checkpoint()), data=False)
    assert [problem.fix for problem in found] == ["--checkpoint.every 100"]


def test_a_state_that_cannot_be_saved_does_not_hide_why_the_run_stops(tmp_path: Path) -> None:
    recipe, bad = saving_every_step(tmp_path)
    recipe = replace(recipe, checkpoint=Checkpoint(every=3, asynchronous=False, retry_seconds=0))
    full = OSError(28, "No space left on device")
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(RunError, match=f"at step {BAD}") as error,
    ):
        patch.setattr(LocalPlace, "begin", mock.Mock(side_effect=full))
        run(poisoned(recipe, bad, Stop()), tmp_path / "run")
    assert "which is saved" not in str(error.value) and "No space left" in str(error.value)
    assert read_replay(tmp_path / "run").checkpoint_step == 0


def test_a_stopped_run_goes_on_with_another_policy(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    recipe = recipe_in(tmp_path)
    assert run(recipe, tmp_path / "whole") == 0
    bad = tuple(steps_of(tmp_path / "whole")[5]["sample_ids"][:1])
    with pytest.raises(RunError, match="those of step 5, which is saved"):
        run(poisoned(recipe, bad, Stop()), tmp_path / "run")
    assert saved_steps(tmp_path / "run") == [2, 4, 5]
    assert run(poisoned(recipe, bad, Skip()), tmp_path / "run") == 0
    assert events_of(tmp_path / "run", "start")[-1]["resumed_from"] == 5
    assert measured(tmp_path / "run")[:5] == measured(tmp_path / "whole")[:5]


def test_a_spike_is_skipped_and_the_window_survives_a_resume(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    recipe = recipe_in(tmp_path)
    assert run(recipe, tmp_path / "whole") == 0
    bad = tuple(steps_of(tmp_path / "whole")[7]["sample_ids"][:1])
    spikes = {"spike": 100.0, "spike_factor": 8.0, "spike_window": 4}
    chosen = poisoned(recipe, bad, Skip(), **spikes)
    assert run(chosen, tmp_path / "run") == 0
    (event,) = (e for e in events_of(tmp_path / "run", "step") if e.get("skipped"))
    assert event["step"] == 8 and event["loss"] > 8
    state = tmp_path / "run" / "checkpoints" / "step-00000006"
    recent = json.loads(next(state.rglob("state.json")).read_text())["recent"]
    assert [pair[0] for pair in recent] == [one[2] for one in measured(tmp_path / "run")[2:6]]
    assert run(chosen, tmp_path / "again", resume=str(state)) == 0
    assert measured(tmp_path / "again") == measured(tmp_path / "run")[6:]


def test_a_dump_that_cannot_be_written_is_a_warning_and_no_more(tmp_path: Path) -> None:
    recipe, bad = saving_every_step(tmp_path)
    (tmp_path / "run").mkdir()
    folder = tmp_path / "run" / "guard"
    original = Path.mkdir

    def refuse(self: Path, *arguments: Any, **keywords: Any) -> None:
        if self == dump_folder(tmp_path / "run", BAD):
            raise OSError(28, "No space left on device", str(self))
        original(self, *arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        assert run(poisoned(recipe, bad, Skip()), tmp_path / "run") == 0
    messages = [event["message"] for event in events_of(tmp_path / "run", "warning")]
    assert any("could not be dumped" in message for message in messages)
    assert not folder.exists()
    with pytest.raises(UserError):
        read_replay(tmp_path / "run")
