"""`armillary mesh`: the books of a mesh, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from armillary.cli.main import main
from armillary.cli.mesh_text import spans
from snapshots import assert_matches_snapshot

SNAPSHOTS = Path(__file__).parent / "snapshots" / "mesh"

PAGES = {
    "one_rank": "debug",
    "everything": "debug --world 16 --parallel.pp 2 --parallel.cp 2 --parallel.tp 2 "
    "--budget.microbatch-sequences 1",
    "v_shaped": "debug --world 4 --parallel.pp 2 --parallel.schedule DualPipeV "
    "--budget.microbatch-sequences 1",
    "of_one_rank": "debug --world 8 --rank 5 --parallel.pp 2 --parallel.tp 2 --optimizer muon "
    "--budget.microbatch-sequences 1",
    "experts": "debug-deepseek --world 8 --parallel.tp 2 --parallel.ep 4 --rank 6",
    "uneven": "debug --world 3 --budget.batch-tokens 1536",
}

BAD = {
    "rank": "debug --world 4 --rank 4",
    "world": "debug --world 0",
    "degrees": "debug --world 8 --parallel.tp 3 --parallel.cp 3 --parallel.ep 2",
}


def facts(typed: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["mesh", *typed.split(), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_axes_stages_and_holdings(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mesh", *PAGES[name].split()]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert_matches_snapshot(f"$ armillary mesh {PAGES[name]}\n{out}", SNAPSHOTS / f"{name}.txt")


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mesh", *BAD[name].split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert_matches_snapshot(f"$ armillary mesh {BAD[name]}\n{err}", SNAPSHOTS / f"bad_{name}.txt")


def test_json_holds_the_same_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    whole = facts(PAGES["everything"], capsys)
    assert whole["axes"] == {
        "pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 2, "tp": 2, "ep": 1, "expert_tp": 1,
    }  # fmt: skip
    assert sorted(rank for role in whole["roles"] for rank in role["ranks"]) == list(range(16))
    one = facts(PAGES["everything"] + " --rank 9", capsys)["rank"]
    (role,) = (role for role in whole["roles"] if 9 in role["ranks"])
    assert one["bytes"] == role["bytes"]
    assert one["bytes"]["parameters"] == 4 * one["parameters"]
    assert (one["receives_from"], one["sends_to"]) == ([1], [])
    assert one["groups"]["fsdp"] == [9, 11, 13, 15]
    shapes = {each["name"]: each["local_shape"] for each in one["tensors"]}
    assert shapes["norm.weight"] == [32]


def test_as_few_ranks_as_the_degrees_need_unless_told(capsys: pytest.CaptureFixture[str]) -> None:
    typed = "debug --parallel.tp 2 --parallel.cp 2"
    assert facts(typed, capsys)["world_size"] == 4
    assert facts(typed + " --world 8", capsys)["axes"]["dp_shard"] == 2


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([7], "7"),
        ([1, 2], "1 2"),
        ([0, 1, 2, 3], "0-3"),
        ([0, 64, 128], "0 64 128"),
        ([0, 8, 16, 24, 32], "0 8 16 .. 32"),
        ([0, 1, 4, 5, 9], "0-1 4-5 9"),
        ([0, 2, 3, 5, 7, 9], "0 2-3 5 7 .. 9"),
    ],
)
def test_ranks_are_shown_in_short(numbers: list[int], text: str) -> None:
    assert spans(numbers) == text
