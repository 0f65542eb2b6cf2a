"""docs/how-to/add-a-component.md, run as a reader would."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from armillary.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "add-a-component.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which a reader has saved the page's code."""
    for name, code in zip(("lion.py", "experiment.py"), blocks("python"), strict=True):
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ARMILLARY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    torch.set_num_threads(1)
    yield tmp_path
    sys.modules.pop("lion", None)


def small_corpus() -> list[str]:
    """The page trains on the whole standard library; one folder of it does for a test."""
    return ["--data.corpus.folder", str(Path(json.__file__).parent.parent / "asyncio")]


def test_the_page_trains_with_the_component_and_repeats_the_run(
    reader: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use, refused, difference = (
        [shlex.split(line.removeprefix("PYTHONPATH=. "))[1:] for line in block.splitlines()]
        for block in blocks("shell")
    )
    show, train, again = use
    assert main(show) == 0
    assert f'kind = "{reader}/lion.py:lion"' in capsys.readouterr().out
    assert main([*train, *small_corpus()]) == 0
    assert main(again) == 0
    assert losses(reader / "lion-run") == losses(reader / "lion-again")
    assert losses(reader / "lion-run")[-1] < losses(reader / "lion-run")[0]

    capsys.readouterr()
    assert main(refused[0]) == 2
    assert "there is no optimizer.beta" in capsys.readouterr().err

    assert main(difference[0]) == 0
    assert "lion:lion" in capsys.readouterr().out


def losses(run: Path) -> list[float]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["kind"] == "step"]
