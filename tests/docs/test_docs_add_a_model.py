"""docs/how-to/add-a-model.md, run as a reader would."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from armillary.cli.main import main
from armillary.inference.generate import generate
from armillary.models.layers.documents import Documents
from armillary.parallel.materialise import materialise
from armillary.recipe import get

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "add-a-model.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a reader has saved the page's code."""
    folder = tmp_path_factory.mktemp("reader")
    family, check = blocks("python")
    (folder / "parallel_family.py").write_text(family)
    (folder / "check.py").write_text(check)
    return folder


@pytest.fixture
def reader(saved: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same folder, gone into."""
    monkeypatch.chdir(saved)
    monkeypatch.setenv("ARMILLARY_CACHE", str(saved / "cache"))
    return saved


def test_the_page_builds_counts_and_trains(reader: Path) -> None:
    done = subprocess.run([sys.executable, "check.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "131,776 parameters" in done.stdout


def test_the_pages_family_keeps_documents_apart_and_generates(reader: Path) -> None:
    model = get("parallel_family.py:parallel-tiny").model.build()
    materialise(model, torch.device("cpu"), seed=1)
    tokens, documents = torch.arange(40)[None], Documents.from_lengths([[15, 25]])
    changed = torch.cat((tokens[:, :15] + 1, tokens[:, 15:]), dim=1)
    difference = (model(tokens, documents) - model(changed, documents)).abs()
    assert difference[:, 15:].max() == 0 < difference[:, :15].max()
    prompts = [[1, 2, 3], [4]]
    together = generate(model, prompts, max_new_tokens=5, temperature=0)
    assert together == [
        generate(model, [prompt], max_new_tokens=5, temperature=0)[0] for prompt in prompts
    ]


def test_the_pages_commands_work(reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show, show_in_other, train = (shlex.split(line)[1:] for line in blocks("shell")[0].splitlines())
    for command in (show, show_in_other):
        assert main(command) == 0
        assert "parallel_family.py:parallel-block" in capsys.readouterr().out
    small = "--data.corpus text --data.corpus.files texts/*.txt --data.validation-fraction 0.5"
    (reader / "texts").mkdir()
    for index in range(8):
        (reader / "texts" / f"{index}.txt").write_text(f"{index} is a number. " * 200)
    assert main([*train, *small.split(), "--run", "tried"]) == 0
    assert main(["generate", "tried", "--prompt", "1 is", "--max-new-tokens", "4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["step"], document["texts"][0]["prompt"]) == (5, "1 is")
