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


def test_list_names_every_recipe_by_family_with_its_hardware(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = json.loads(output("list --json", capsys))
    assert sorted(row["name"] for row in rows) == sorted(names())
    families = list(dict.fromkeys(row["family"] for row in rows))
    assert [row["family"] for row in rows] == sorted(
        (row["family"] for row in rows), key=families.index
    )
    text = output("list", capsys)
    (line,) = [line for line in text.splitlines() if line.split()[:1] == ["llama3-8b-8gpu"]]
    assert line.split()[1:8] == ["8", "GPUs", "8.03B", "161B", "60", "GB", "Llama"]
    assert [line for line in text.splitlines() if line in families] == families


def test_list_can_be_narrowed(capsys: pytest.CaptureFixture[str]) -> None:
    def found(typed: str) -> set[str]:
        return {row["name"] for row in json.loads(output(f"list {typed} --json", capsys))}

    assert found("--family gpt-oss --gpus 64") == {"gpt-oss-20b-64gpu"}
    assert found("--gpus 1 --search 4B") == {"qwen3-4b-1gpu"}
    assert {"starter", "debug", "llama3-cpu"} <= found("--gpus 0")
    assert "llama3-8b" not in found("--gpus 8")


def test_a_narrowed_list_without_recipes_says_what_there_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["recipes", "list", "--family", "lama3"]) == 2
    assert "try: --family llama3" in capsys.readouterr().err
    assert main(["recipes", "list", "--gpus", "7"]) == 2
    assert "--gpus 0, 1, 8, 64, 128" in capsys.readouterr().err


def test_explain_tells_each_value_with_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    text = output("show llama3-8b-8gpu --explain --optimizer.eps 1e-9", capsys)
    assert "optimizer.lr = 0.0003\n    source: Llama 3 herd, arXiv 2407.21783, table 3\n" in text
    assert "optimizer.eps = 1e-09\n    set here: 1e-08 in the recipe\n" in text
    assert "optimizer.weight_decay = 0.1\n    default: Share of a weight" in text
    whole = json.loads(output("show llama3-8b-8gpu --explain --json", capsys))
    assert {leaf["from"] for leaf in whole["leaves"]} == {"default", "source"}
    assert whole["gpus"] == 8
    assert 50e9 < sum(whole["memory"].values()) < 80e9
    plain = json.loads(output("show llama3-8b-8gpu --json", capsys))
    assert plain["recipe"]["optimizer"]["lr"] == 3e-4


def test_explain_knows_the_sources_of_a_file_of_your_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from armillary.recipe import Budget, Recipe, recipe\n"
        '@recipe("mine", sources={"budget": "ours: a day"})\n'
        "def mine() -> Recipe:\n    return Recipe(budget=Budget(steps=9), seed=4)\n"
    )
    text = output(f"show {file}:mine --explain", capsys)
    assert "budget.steps = 9\n    source: ours: a day\n" in text
    assert "seed = 4\n    no source: " in text


def test_explain_of_a_step_gives_what_its_stage_sets_the_source_of_the_stage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = output("show llama3-8b-long-128gpu --explain --step 3700000", capsys)
    assert "budget.seq_len = 131072\n    source: Llama 3 herd, arXiv 2407.21783: six" in text
    assert "set here" not in text


def test_memory_is_not_told_of_a_recipe_that_does_not_go_on_its_gpus(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "uneven.py"
    file.write_text(
        "from armillary.recipe import get, recipe\n"
        '@recipe("uneven", gpus=3)\n'
        "def uneven():\n    return get('debug')\n"
    )
    facts = json.loads(output(f"show {file}:uneven --explain --json", capsys))
    assert (facts["gpus"], facts["memory"]) == (3, None)


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
