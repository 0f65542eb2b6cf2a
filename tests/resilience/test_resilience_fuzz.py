"""A short run of the trial with hostile files, and whether it would notice what it looks for."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from reliability.fuzz import Watch

SCRIPT = Path(__file__).parents[1] / "reliability" / "fuzz.py"


def test_hostile_files_are_refused_in_words_and_change_nothing_outside(tmp_path: Path) -> None:
    words = ["--inputs", "2000", "--seed", "5", "--keep", str(tmp_path)]
    made = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    assert "2,000 inputs, seed 5: 0 failures." in made.stdout


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


def test_what_happens_inside_is_nobodys_business(watch: Watch, tmp_path: Path) -> None:
    with watch.over(tmp_path) as seen:
        (tmp_path / "a").write_text("")
        (tmp_path / "a").rename(tmp_path / "b")
        Path(__file__).read_text()
    assert seen == []


@pytest.mark.parametrize("how", ["open", "rename", "remove", "mkdir", "through a link"])
def test_a_change_outside_is_noticed(watch: Watch, tmp_path: Path, how: str) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (outside / "a").touch()
    (inside / "link").symlink_to(outside)
    with watch.over(inside.resolve()) as seen:
        match how:
            case "open":
                (inside / ".." / "outside" / "b").write_text("")
            case "rename":
                (outside / "a").rename(inside / "a")
            case "remove":
                (outside / "a").unlink()
            case "mkdir":
                (outside / "c").mkdir()
            case _:
                (inside / "link" / "b").write_text("")
    assert len(seen) == 1


class Runs:
    """What a hostile pickle does."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.getenv, ("HOME",)


def test_an_object_that_is_rebuilt_and_a_process_that_is_started_are_noticed(
    watch: Watch, tmp_path: Path
) -> None:
    made = pickle.dumps(Runs())
    with watch.over(tmp_path) as seen:
        pickle.loads(made)
        exec(compile("1 + 1", "config.json", "exec"))
    assert [each.split()[0] for each in seen] == ["pickle.find_class", "exec"]
