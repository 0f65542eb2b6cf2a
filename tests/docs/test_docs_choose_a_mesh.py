"""docs/how-to/choose-a-mesh.md, run as a reader would."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from armillary.cli.main import main
from armillary.foundation.run_folder import CHECKPOINTS_FOLDER

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "choose-a-mesh.md"


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```shell\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def test_every_command_of_the_page_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    printed: list[str] = []
    shows, trains = [], []
    for command in commands():
        assert command[0] == "armillary"
        (trains if command[1] == "train" else shows).append(command[1:])
    for show in shows:
        is_refused = "--parallel.ep" in show
        assert main(show) == (2 if is_refused else 0)
        out, err = capfd.readouterr()
        printed.append(err if is_refused else out)
    eight, large, one_rank, document, refused = printed
    assert "dp_shard 8" in eight and "8.03B parameters" in eight
    assert "stage" in large and "0 64 128 .. 448" in large
    assert "receives from rank 236, sends to rank 364" in one_rank
    assert json.loads(document)["world_size"] == 16
    assert refused.count("error: ") == 2
    for train in trains:
        quick = ["--validation.final-sequences", "2", "--sampling.tokens", "1"]
        assert main([*train, *quick]) == 0, capfd.readouterr().err
    steps = sorted(path.name for path in (tmp_path / "my-run" / CHECKPOINTS_FOLDER).iterdir())
    assert steps[-1] == "step-00000004"
    events = [json.loads(line) for line in (tmp_path / "my-run/events.jsonl").open()]
    starts = [event for event in events if event["kind"] == "start"]
    assert [start["world_size"] for start in starts] == [2, 1]
    assert starts[1]["resumed_from"] == 2
