"""docs/how-to/evaluate.md, run as a reader would."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from armillary.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "evaluate.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_the_page_evaluates_in_the_loop_and_afterwards_with_the_same_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ARMILLARY_CACHE", str(tmp_path / "cache"))
    (capitals,) = blocks("json")
    Path("capitals.jsonl").write_text(capitals)
    commands = [
        shlex.split(line)[1:]
        for block in blocks("shell")
        for line in block.replace("\\\n", " ").splitlines()
    ]
    train, evaluate, again = commands[:3]
    small = ["--data.corpus.folder", str(Path(json.__file__).parent.parent / "asyncio")]
    assert main([*train, *small]) == 0
    events = [json.loads(line) for line in Path("asked/events.jsonl").read_text().splitlines()]
    told = [event for event in events if event["kind"] == "evaluation"]
    assert {event["step"] for event in told} == {10, 20}
    last = {(e["task"], e["metric"]): e["value"] for e in told if e["step"] == 20}
    capsys.readouterr()
    assert main([*evaluate, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["tasks"]
    assert {(t, m): v for t, each in found.items() for m, v in each["metrics"].items()} == last
    assert main(again) == 0
    assert "capitals" in capsys.readouterr().out
