"""docs/how-to/compare-two-recipes.md, run as a reader would."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from armillary.cli.main import main
from armillary.launch import local
from data_examples import write_texts

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "compare-two-recipes.md"


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```shell\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def test_every_command_of_the_page_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ARMILLARY_CACHE", str(tmp_path / "cache"))
    write_texts(tmp_path / "texts", 120)
    trained: list[str] = []

    def run_once(argv: Sequence[str], nproc: int, *, signals: object) -> local.Ended:
        """In this process, which has torch already, and on a little text."""
        trained.append(argv[3])
        quick = ["--budget.batch-tokens", "256", "--validation.final-sequences", "2"]
        return local.Ended(main([*argv, *quick]))

    monkeypatch.setattr(local, "run_once", run_once)
    printed = []
    for command in commands():
        assert command[:2] == ["armillary", "compare"]
        little = []
        if "debug" in command:
            little = ["--data.corpus", "text", "--data.corpus.files", "texts/**/*.txt"]
        fewer = ["--seeds", "1"] if "sweep" in command or "again" in command else []
        assert main(["compare", *little, *command[2:], *fewer]) == 0, capsys.readouterr().err
        printed.append(capsys.readouterr().out)
    first, more, document, shown, sweep, _, runs = printed
    assert len(trained) == 6 + 3 + 2  # the page asks for two seeds where one is taken here
    assert first.startswith("verdict: ")
    assert "cost" in more and "to 4.5" in more
    assert len(json.loads(document)["recipes"][0]["runs"]) == 3
    assert shown.splitlines()[0] == first.splitlines()[0]
    assert (tmp_path / "rates.html").stat().st_size > 10_000
    assert "debug lr=0.003162" in sweep
    assert "100" in json.dumps(json.loads((tmp_path / "again/compare.json").read_text()))
    assert "3/3" not in runs and "2/2" in runs
