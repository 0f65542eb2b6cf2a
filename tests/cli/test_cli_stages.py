"""What commands show of a recipe with stages: that of the step which is asked for."""

from __future__ import annotations

import json

import pytest

from armillary.cli.main import main

STAGED = ["debug", "--budget.steps", "none", "--stages.0.steps", "3", "--stages.1.steps", "2"]
STAGED += ["--stages.1.set", "budget.seq_len=256,parallel.tp=2,parallel.dp_shard=1"]


@pytest.mark.parametrize(("step", "seq_len"), [("3", 128), ("4", 256), ("5", 256)])
def test_recipes_show_prints_the_recipe_of_a_step(
    step: str, seq_len: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes", "show", *STAGED, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["recipe"]["stages"]) == 2
    assert main(["recipes", "show", *STAGED, "--step", step, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["recipe"]
    assert (shown["budget"]["seq_len"], shown["stages"]) == (seq_len, [])


def test_mesh_shows_the_ranks_of_a_step_and_refuses_one_that_is_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for step, tp in (("1", 1), ("4", 2)):
        assert main(["mesh", *STAGED, "--world", "2", "--step", step, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["axes"]["tp"] == tp
    assert main(["mesh", *STAGED, "--step", "6"]) == 2
    assert "--step 6" in (said := capsys.readouterr().err)
    assert "1 to 5" in said
