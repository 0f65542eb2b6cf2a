"""docs/how-to/train-on-my-own-text.md, run as a reader would."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from armillary.cli.main import main
from data_examples import write_texts

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "train-on-my-own-text.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with texts of the kinds that the page speaks of, and its code saved."""
    write_texts(tmp_path / "my-texts", 120)
    (tmp_path / "all-of-it.txt").write_text("\n\n".join(f"chapter {n} of all" for n in range(99)))
    lines = [json.dumps({"body": f"line {n}"}) for n in range(99)]
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines/a.jsonl").write_text("\n".join(lines))
    (tmp_path / "mine.py").write_text(*blocks("python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ARMILLARY_CACHE", str(tmp_path / "cache"))
    torch.set_num_threads(1)
    return tmp_path


def test_every_command_of_the_page_does_what_it_says(
    reader: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = {}
    for block in blocks("shell"):
        for line in block.splitlines():
            command = shlex.split(line)
            assert command[0] == "armillary"
            if command[1] == "train":
                command += ["--budget.batch-tokens", "512"]  # an eighth of the page's, to be quick
            assert main(command[1:]) == 0, capsys.readouterr().err
            printed[line] = capsys.readouterr().out
    first, sample, separated, train, text, jsonl, mine, train_mine = printed
    assert "documents, " in printed[first]
    assert "<|bos|>" in printed[sample] or "<|eos|>" in printed[sample]
    for command in (separated, jsonl):
        counts = re.findall(r"([\d,]+) documents", printed[command])
        assert sum(map(int, counts)) == 99
    assert (reader / "my-run/events.jsonl").exists(), train
    assert (reader / "mine-run/events.jsonl").exists(), train_mine
    assert printed[text].startswith("Once")
    assert "of part 1 (jsonl)" in printed[mine]
