"""docs/how-to/fine-tune.md, run as a reader would."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from armillary.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "fine-tune.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the conversations of the page, and no others."""
    (tmp_path / "chats.jsonl").write_text(blocks("json")[0])
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
            if command[1] == "train":  # shorter than the page's, to be quick
                command += ["--budget.batch-tokens", "512", "--budget.steps", "4"]
            assert main(command[1:]) == 0, capsys.readouterr().err
            printed[line] = capsys.readouterr().out
    build, inspect, train, _, lora = printed
    assert "documents, " in printed[build]
    assert "<|im_start|>" in printed[inspect]
    template = (reader / "my-chat/tokenizer/chat_template.jinja").read_text()
    assert "{%- generation %}" in template, train
    assert (reader / "my-lora/tokenizer/chat_template.jinja").read_text() == template, lora
    events = [json.loads(line) for line in (reader / "my-chat/events.jsonl").open()]
    learned = [event["tokens"] for event in events if event["kind"] == "step"]
    assert learned and all(0 < tokens < 512 / 2 for tokens in learned)
