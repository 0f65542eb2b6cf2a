"""docs/launch.md: its examples, run as a reader would, without writing."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from armillary.cli.launch_command import LAUNCHERS
from armillary.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "launch.md"
COMMANDS = [
    shlex.split(line)[1:]
    for line in re.findall(r"^    (armillary launch .*)$", PAGE.read_text(), re.MULTILINE)
]


def test_the_page_shows_every_launcher() -> None:
    assert {command[1] for command in COMMANDS} == set(LAUNCHERS)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[1])
def test_every_example_of_the_page_is_taken_as_it_is_written(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--dry-run"]) == 0
    assert not list(tmp_path.iterdir())
