"""`armillary recipes`, and the help of commands that take a recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from armillary.cli.main import main
from armillary.recipe import get, names, recipe_sha256
from snapshots import assert_matches_snapshot

SNAPSHOTS = Path(__file__).parent / "snapshots"


def output(typed: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["recipes", *typed.split()]) == 0
    return capsys.readouterr().out


def test_list_names_every_recipe_and_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output("list", capsys).splitlines()
    assert [line.split()[0] for line in lines] == names()
    assert [item["name"] for item in json.loads(output("list --json", capsys))] == names()


def test_show_prints_toml_that_makes_the_recipe_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "r.toml"
    file.write_text(
        output("show debug --optimizer muon --optimizer.lr 3e-3 --no-data.shuffle", capsys)
    )
    again = output(f"show --from-file {file} --json", capsys)
    direct = output(
        "show debug --no-data.shuffle --optimizer=muon --optimizer.lr=3e-3 --json", capsys
    )
    one, two = json.loads(again), json.loads(direct)
    assert one["recipe"] == two["recipe"]
    assert one["recipe_sha256"] == two["recipe_sha256"] != recipe_sha256(get("debug"))
    assert one["recipe"]["optimizer"]["kind"] == "muon"


def test_show_alone_shows_what_train_alone_trains(capsys: pytest.CaptureFixture[str]) -> None:
    assert output("show", capsys) == output("show starter", capsys)


def test_diff_puts_values_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output("diff llama3-8b llama3-70b", capsys).splitlines()
    assert lines[0].split() == ["llama3-8b", "llama3-70b"]
    assert [line.split() for line in lines if line.startswith("optimizer.lr")] == [
        ["optimizer.lr", "0.0003", "0.00015"]
    ]
    assert output("diff debug debug", capsys) == "no value differs\n"
    # A value may be spelled as a recipe is, and words may stand after options.
    same = output("diff llama3-8b --telemetry.wandb-project debug debug --json", capsys)
    assert "telemetry.wandb_project" not in [item["leaf"] for item in json.loads(same)]
    assert main(["recipes", "diff", "debug", "starter", "--jsn"]) == 2
    assert "try: --json" in capsys.readouterr().err
    same = output("diff llama3-8b llama3-70b --optimizer.lr 1 --json", capsys)
    assert "optimizer.lr" not in [item["leaf"] for item in json.loads(same)]


@pytest.mark.parametrize("command", ["train", "recipes show"])
def test_help_of_a_recipe_lists_its_values_as_they_would_be(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "debug", "--schedule", "cosine", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--schedule.floor NUMBER  [0.1]\n        Factor at the end of the run" in text
    assert "--budget.seq-len INT  [128]" in text
    assert "decay-fraction" not in text
    assert_matches_snapshot(
        text[: text.index("values of")], SNAPSHOTS / f"help_{command.replace(' ', '_')}.txt"
    )
