"""A step that would poison a run: what each policy does, on all ranks, and that it can be repeated.

One sample makes the loss not a number, on the one rank that reads it.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from poisoned_task import Poisoned
from safetensors.torch import load_file

from armillary.checkpoint.config import Checkpoint
from armillary.checkpoint.places.local import LocalPlace
from armillary.cli.main import main
from armillary.foundation.errors import RunError, UserError
from armillary.foundation.progress import NoProgress
from armillary.models.layers.mlp import SwiGLU
from armillary.optim.muon import Muon
from armillary.parallel.config import Parallel
from armillary.recipe.problems import problems
from armillary.recipe.recipe import Recipe
from armillary.recipe.toml import to_toml
from armillary.resilience.guard_config import Guard, GuardPolicy, Rewind, Skip, Stop
from armillary.resilience.guard_dump import dump_folder, read_replay
from armillary.telemetry.history import read_history
from armillary.training import resume, steps
from armillary.training.replay import replay
from armillary.training.session import Session
from armillary.training.state import Position
from armillary.training.train import train
from ranks import run_ranks
from tiny_runs import accumulating, events_of, steps_of, tiny_recipe, write_corpus

STEPS, BAD = 9, 5
SEQUENCES = 16
"""Of a step of `tiny_recipe`."""


def recipe_in(folder: Path, ranks: int = 1) -> Recipe:
    """Accumulates, looks at held-out text on the way, and saves after every second step."""
    recipe = tiny_recipe(folder, steps=STEPS, parallel=Parallel(device="cpu", dp_shard=ranks))
    return replace(accumulating(recipe, 4), checkpoint=Checkpoint(every=2, keep_last=99))


def poisoned(recipe: Recipe, samples: tuple[int, ...], policy: GuardPolicy, **spike: Any) -> Recipe:
    guard = Guard(policy=policy, **{name: spike[name] for name in spike if name != "spike"})
    task = Poisoned(samples=samples, spike=spike.get("spike", 0.0))
    return replace(recipe, task=task, guard=guard)


def run(recipe: Recipe, folder: Path, resume: str = "auto") -> int:
    return train(recipe, name="tiny", folder=folder, resume=resume)


@contextmanager
def lagging() -> Iterator[None]:
    """As on a GPU: what a step measured is read when the next one has been enqueued."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "lag_of", lambda assembly: int(assembly.optimizers.can_skip))
        yield


def weights_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / f"step-{step:08d}"
    return {
        f"{path.name}:{name}": tensor
        for path in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def saved_steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


def measured(run: Path) -> list[tuple[int, list[int], float | None]]:
    return [(step["step"], step["samples"], step["loss"]) for step in steps_of(run)]


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


def saving_every_step(path: Path) -> tuple[Recipe, tuple[int, ...]]:
    write_corpus(path)
    recipe = replace(recipe_in(path), checkpoint=Checkpoint(every=1, keep_last=99))
    assert run(recipe, path / "whole") == 0
    return recipe, tuple(steps_of(path / "whole")[BAD - 1]["sample_ids"][:1])


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


# Repeating the bad step.


def a_stopped_run(folder: str, ranks: int) -> None:
    torch.set_num_threads(1)
    path = Path(folder)
    recipe = recipe_in(path, ranks)
    ids = tuple(json.loads((path / "bad.json").read_text()))
    with pytest.raises(RunError):
        run(poisoned(recipe, ids, Stop()), path / "run")


def repeated(folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    path = Path(folder)
    recipe = poisoned(
        recipe_in(path, 2), tuple(json.loads((path / "bad.json").read_text())), Stop()
    )
    return replay(recipe, path / "run", step=None, progress=NoProgress()).facts()


def test_replay_reproduces_the_step_on_its_own_mesh_and_on_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path)
    recipe = recipe_in(tmp_path)
    assert run(recipe, tmp_path / "whole") == 0
    bad = steps_of(tmp_path / "whole")[BAD - 1]["sample_ids"][-1:]
    (tmp_path / "bad.json").write_text(json.dumps(bad))
    run_ranks(a_stopped_run, 2, str(tmp_path), 2)
    dump = read_replay(tmp_path / "run")
    assert dump.sample_ids[-1:] == bad and dump.world_size == 2 and dump.checkpoint_step == BAD - 1
    assert dump.gradients is not None and "head.weight" in dump.gradients["0"]

    first, second = run_ranks(repeated, 2, str(tmp_path))
    assert first == second
    assert first["reproduced"] and first["bitwise"] and first["begun_at"] == BAD - 1
    assert first["repeated"]["loss"] == first["recorded"]["loss"] == "nan"
    assert first["repeated"]["gradients"] == dump.gradients
    assert first["repeated"]["modules"] == {}  # the model is sound: it is the loss

    capsys.readouterr()
    for step in saved_steps(tmp_path / "run")[1:]:  # from an older checkpoint, with steps between
        (tmp_path / "run" / "checkpoints" / f"step-{step:08d}" / "state.json").unlink()
    one = ["replay", str(tmp_path / "run"), "--nproc", "1", "--parallel.dp-shard", "1"]
    assert main([*one, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["reproduced"] and facts["begun_at"] == 2
    assert main(one) == 0
    page = capsys.readouterr().out
    assert "reproduced, to the last bit" in page and "gradients not finite: embedding" in page


def test_replay_names_the_module_and_tells_a_fault_of_the_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path)
    forward, calls = SwiGLU.forward, 0

    def failing_once(self: SwiGLU, x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return forward(self, x) * (math.inf if calls == 20 else 1)

    monkeypatch.setattr(SwiGLU, "forward", failing_once)
    with pytest.raises(RunError, match="at step 3, "):
        run(recipe_in(tmp_path), tmp_path / "run")
    capsys.readouterr()

    monkeypatch.setattr(SwiGLU, "forward", forward)
    assert main(["replay", str(tmp_path / "run"), "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["recorded"]["kind"] == "not finite" and facts["repeated"]["kind"] == "healthy"
    assert main(["replay", str(tmp_path / "run")]) == 1
    assert "not reproduced: look for a fault of the machine" in capsys.readouterr().out

    # Bad from the first step of the repetition on, which has no step before the bad one.
    monkeypatch.setattr(SwiGLU, "forward", lambda self, x: forward(self, x) * math.inf)
    assert main(["replay", str(tmp_path / "run"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["repeated"]["modules"] == {"0": "layers.0.feed_forward"}


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ([], "0 runs are given"),
        (["nowhere"], "is not a run folder"),
        (["whole"], "no bad step was dumped"),
        (["whole", "--step", "3"], "no step 3 was dumped"),
    ],
)
def test_what_cannot_be_repeated_is_told_in_words(
    typed: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "recipe.toml").write_text(to_toml(recipe_in(tmp_path)))
    assert main(["replay", *typed]) == 2
    assert words in capsys.readouterr().err


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


# Arithmetic of the cursor.


def read_by(position: Position, steps: int, count: int) -> list[int]:
    """The samples of the next steps, in order."""
    found: list[int] = []
    for _ in range(steps):
        samples = position.samples(count)
        position = position.after(samples)
        found += range(*samples)
    return found


def test_samples_that_are_jumped_over_are_the_only_ones_not_read() -> None:
    position = Position(cursor=20)
    position.jump(24, 32)
    position.jump(0, 12)  # read already
    position.jump(32, 36)
    position.jump(44, 48)
    assert position.jumped == [[24, 36], [44, 48]]
    assert read_by(position, 4, 4) == [*range(20, 24), *range(36, 44), *range(48, 52)]
    # A step that would reach into them begins behind them, also where steps have become longer.
    assert read_by(position, 2, 5) == [*range(36, 41), *range(48, 53)]
    again = Position.from_scalars(
        json.loads(json.dumps(position.scalars())), data_fingerprint="", path=""
    )
    assert again == position
