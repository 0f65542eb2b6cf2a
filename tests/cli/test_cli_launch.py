"""`armillary launch`: checked, written, handed over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from armillary.cli.launch_command import LAUNCHERS
from armillary.cli.main import main

ENOUGH = {
    "slurm": [],
    "kubernetes": ["--image", "a/b:1", "--volumes", "data:/data"],
    "skypilot": ["--storage", "s3://bucket"],
    "torchrun": [],
}
SMALL = ["--nodes", "2", "--gpus-per-node", "2"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_dry_run_prints_what_else_is_written(
    launcher: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["launch", launcher, "debug", *SMALL, *ENOUGH[launcher]]
    assert main([*typed, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert not list(here.iterdir())
    assert main([*typed, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["text"], document["world_size"]) == (text, 4)
    assert Path(document["file"]).read_text() == text


def test_what_is_written_comes_with_what_to_type_next(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "slurm", "debug", *SMALL, "--out", "jobs/a.sbatch"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "wrote jobs/a.sbatch: 2 machines, 4 ranks, run runs/debug",
        "next: sbatch jobs/a.sbatch",
    ]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["slurm", "debug", *SMALL, "--parallel.tp", "3"], "parallel.tp = 3"),
        (["slurm", "debug", "--nodes", "3"], "24 data ranks cannot share evenly"),
        (["torchrun", "debug", *SMALL, "--nodes", "4", "--min-nodes", "3"], "6 data ranks"),
        (["slurm", "debug", "--nodes", "0"], "--nodes 0"),
        (["kubernetes", "debug", *SMALL], "--image"),
        (["torchrun", "debug", *SMALL, "--submit"], "started by hand"),
        (["slurm", "debug", *SMALL, "--submit"], "there is no sbatch here"),
    ],
)
def test_recipe_mesh_and_options_are_checked_before_anything_is_written(
    typed: list[str],
    said: str,
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(here))
    assert main(["launch", *typed]) == 2
    assert said in capsys.readouterr().err
    assert not list(here.iterdir())


def test_a_file_that_cannot_be_written_is_told_in_words(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "file").touch()
    assert main(["launch", "slurm", "debug", *SMALL, "--out", "file/a.sbatch"]) == 1
    assert "cannot write file/a.sbatch" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "exit_code"), [(0, 0), (1, 1)])
def test_submitting_hands_the_file_over_and_tells_what_was_said(
    code: int,
    exit_code: int,
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sbatch = here / "sbatch"
    sbatch.write_text(f'#!/bin/sh\necho "took $1"\nexit {code}\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}:/usr/bin:/bin")
    assert main(["launch", "slurm", "debug", *SMALL, "--submit"]) == exit_code
    shown = capsys.readouterr()
    assert "took debug.sbatch" in (shown.out if code == 0 else shown.err)
