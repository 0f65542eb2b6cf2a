"""A bad step that was dumped, repeated: reproduced, or a fault of the machine."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded_runs import (
    BAD,
    poisoned,
    recipe_in,
    run,
    saved_steps,
)

from armillary.checkpoint.hugging_face.config import Initial
from armillary.cli.main import main
from armillary.foundation.errors import RunError
from armillary.foundation.progress import NoProgress
from armillary.models.layers.mlp import SwiGLU
from armillary.recipe.toml import to_toml
from armillary.resilience.guard_config import Stop
from armillary.resilience.guard_dump import read_replay
from armillary.training.replay import replay
from ranks import run_ranks
from tiny_runs import steps_of, write_corpus


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
    assert facts["reproduced"] and facts["begun_at"] == 2 and not facts["same_recipe"]
    assert main(one) == 0
    page = capsys.readouterr().out
    assert "reproduced, to the last bit" in page and "gradients not finite: embedding" in page

    assert main([*one, "--budget.batch-tokens", "256"]) == 2
    assert "the step had 16 sequences, and this recipe's steps have 8" in capsys.readouterr().err
    with pytest.raises(RunError):  # the same step once more, on one rank: a dump of its own
        run(poisoned(recipe, tuple(bad), Stop()), tmp_path / "run")
    assert main(["replay", str(tmp_path / "run"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["bitwise"] and facts["same_recipe"]


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
    assert main(["replay", str(tmp_path / "run"), "--max-gradient-norm", "2.0"]) == 1
    assert "and the recipe is not the one of the step" in capsys.readouterr().out

    # Bad from the first step of the repetition on, which has no step before the bad one.
    monkeypatch.setattr(SwiGLU, "forward", lambda self, x: forward(self, x) * math.inf)
    assert main(["replay", str(tmp_path / "run"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["repeated"]["modules"] == {"0": "layers.0.feed_forward"}


def test_a_step_after_first_weights_of_another_run_is_repeated_from_these(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    recipe = recipe_in(tmp_path)
    assert run(recipe, tmp_path / "whole") == 0
    bad = tuple(steps_of(tmp_path / "whole")[0]["sample_ids"][-1:])
    begun = replace(recipe, initial=Initial(weights=str(tmp_path / "whole")))
    stopping = poisoned(begun, bad, Stop())
    with pytest.raises(RunError, match="at step 1"):
        run(stopping, tmp_path / "run")
    facts = replay(stopping, tmp_path / "run", step=None, progress=NoProgress())
    assert facts.reproduced and facts.bitwise and facts.begun_at == 0


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
