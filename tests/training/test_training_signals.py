"""A request to stop, whenever it comes: exit code 75, said in one line, and the run completes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from armillary.checkpoint.places.local import LocalPlace
from armillary.cli.main import main
from armillary.recipe.budget import Sampling, Validation
from armillary.recipe.recipe import Recipe
from armillary.recipe.toml import to_toml
from tiny_runs import accumulating, events_of, steps_of, tiny_recipe, write_corpus

STEPS = 9
WORDS = "stopped on request (SIGTERM); the same command goes on from here"
HELD_OUT = ("name", "step", "loss", "bits_per_byte", "tokens")


def recipe_in(folder: Path) -> Recipe:
    """Looks at held-out text and checkpoints on the way, a yardstick and some text at the end."""
    recipe = accumulating(tiny_recipe(folder, steps=STEPS), 2)
    return replace(
        recipe,
        validation=Validation(every=4, sequences=12),
        checkpoint=replace(recipe.checkpoint, every=3),
        sampling=Sampling(prompts=("the ring",), tokens=6),
    )


def looks_of(run: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """What was measured on held-out text, by set and step; repeats are the same or fail here."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for event in events_of(run, "validation"):
        values = {name: event[name] for name in HELD_OUT}
        assert found.setdefault((event["name"], event["step"]), values) == values
    return found


def train(folder: Path, run: str) -> int:
    return main(["train", "--from-file", str(folder / "recipe.toml"), "--run", str(folder / run)])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipe, its corpus and its run that nobody interrupted."""
    folder = tmp_path_factory.mktemp("signals")
    write_corpus(folder)
    (folder / "recipe.toml").write_text(to_toml(recipe_in(folder)))
    assert train(folder, "whole") == 0
    return folder


def signal_at(
    monkeypatch: pytest.MonkeyPatch, place: str, call: int, when: Callable[..., bool] | None = None
) -> Callable[[], bool]:
    """Sends SIGTERM during one of the calls of `place` (those that `when` wants count).

    Returns whether that has happened.
    """
    module, name = place.split(":")
    __import__(module)
    holder: Any = sys.modules[module]
    *outer, name = name.split(".")
    for part in outer:
        holder = getattr(holder, part)
    original, calls = getattr(holder, name), 0

    def interrupted(*args: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += when is None or when(*args)
        if calls == call:
            calls += 1
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **keywords)

    monkeypatch.setattr(holder, name, interrupted)
    return lambda: calls > call


def is_final(dataset: Any, *_: object) -> bool:
    return bool(dataset.n_rows > 12)


PLACES: dict[str, tuple[str, int, Callable[..., bool] | None, int | None]] = {
    "reading the corpus": ("armillary.data.build:scan_piece", 1, None, None),
    "learning the vocabulary": ("armillary.data.build:load_tokenizer", 1, None, None),
    "encoding the corpus": ("armillary.data.build:encode_piece", 1, None, None),
    "building the model": ("armillary.training.prepare:assemble", 1, None, 0),
    "the first step": ("armillary.parallel.model:ParallelModel.forward_backward", 1, None, 1),
    "a look at held-out text": (
        "armillary.data.dataset:ValidationDataset.batch",
        2,
        lambda *args: not is_final(*args),
        4,
    ),
    "handing over a checkpoint": ("armillary.training.session:gather_state", 1, None, 3),
    "writing a checkpoint": ("armillary.checkpoint.writing:Writer.write", 1, None, 3),
    "the last checkpoint": ("armillary.checkpoint.writing:Writer.write", 3, None, 9),
    "the final scoring": ("armillary.data.dataset:ValidationDataset.batch", 2, is_final, 9),
    "compressing": ("armillary.training.closing:measure_compressors", 1, None, 9),
    "writing text": ("armillary.inference.generate:choose", 2, None, 9),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_is_asked_to_stop_saves_and_the_same_command_completes_it(
    place: str,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where, call, when, earliest = PLACES[place]
    if not earliest:  # a corpus of its own, still to be read
        write_corpus(tmp_path)
        (tmp_path / "recipe.toml").write_text(to_toml(recipe_in(tmp_path)))
    else:
        (tmp_path / "recipe.toml").write_bytes((whole / "recipe.toml").read_bytes())
    with monkeypatch.context() as patches:
        came = signal_at(patches, where, call, when)
        assert train(tmp_path, "run") == 75
        assert came(), place

    if earliest is None:
        assert not (tmp_path / "run" / "events.jsonl").exists()
        assert capsys.readouterr().err == WORDS + "\n"
    else:
        stop = events_of(tmp_path / "run")[-1]
        assert (stop["kind"], stop["reason"], stop["exit_code"]) == ("stop", WORDS, 75)
        assert 0 <= stop["seconds_from_signal"] <= stop["seconds"]
        assert earliest <= stop["step"] <= min(earliest + 2, STEPS)
        saved = tmp_path / "run" / "checkpoints" / f"step-{stop['step']:08d}" / "manifest.json"
        assert saved.exists()
    assert train(tmp_path, "run") == 0
    assert steps_of(tmp_path / "run") == steps_of(whole / "whole")  # nothing was done twice
    assert looks_of(tmp_path / "run") == looks_of(whole / "whole")
    samples = [event["text"] for event in events_of(tmp_path / "run", "sample")]
    assert samples == [event["text"] for event in events_of(whole / "whole", "sample")]


DURING_THE_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Finder())
from armillary.checkpoint.places.local import LocalPlace
from armillary.cli.main import main
assert "torch" not in sys.modules
sys.exit(main(sys.argv[1:]))
"""


def test_signals_are_heard_while_torch_is_imported(whole: Path, tmp_path: Path) -> None:
    options = ["train", "--from-file", str(whole / "recipe.toml"), "--run", str(tmp_path / "run")]
    made = subprocess.run(
        [sys.executable, "-c", DURING_THE_IMPORT, *options], capture_output=True, text=True
    )
    assert (made.returncode, made.stdout, made.stderr) == (75, "", WORDS + "\n")


def failing_disk(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """A disk that is full when the state after the fourth step is written, so many times."""
    original, left = LocalPlace.write, times

    def write(self: LocalPlace, name: str, chunks: Any) -> Any:
        nonlocal left
        if "step-00000004" in name and left > 0:
            left -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(self, name, chunks)

    monkeypatch.setattr(LocalPlace, "write", write)


def stop_in_the_fourth_step(whole: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    (run.parent / "recipe.toml").write_bytes((whole / "recipe.toml").read_bytes())
    signal_at(monkeypatch, "armillary.parallel.model:ParallelModel.forward_backward", 4)
    return train(run.parent, run.name)


def test_a_stop_insists_on_its_save_for_a_while(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_disk(monkeypatch, times=1)
    assert stop_in_the_fourth_step(whole, tmp_path / "run", monkeypatch) == 75
    saves = [(e["step"], e["state"]) for e in events_of(tmp_path / "run", "checkpoint")]
    assert saves[-3:] == [(4, "staged"), (4, "failed"), (4, "durable")]


def test_a_stop_whose_save_fails_to_the_end_says_what_is_safe(
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("armillary.training.session.STOP_GRACE_SECONDS", 0.5)
    failing_disk(monkeypatch, times=10**6)
    assert stop_in_the_fourth_step(whole, tmp_path / "run", monkeypatch) == 1
    said = capsys.readouterr().err
    assert "No space left on device" in said and "newest durable: step 3" in said
    error, stop = events_of(tmp_path / "run")[-2:]
    assert (error["kind"], stop["kind"]) == ("error", "stop")
    assert (stop["reason"], stop["exit_code"]) == ("failed", 1)
    assert stop["seconds_from_signal"] >= 0.5
    monkeypatch.undo()
    assert train(tmp_path, "run") == 0
    assert events_of(tmp_path / "run", "start")[-1]["resumed_from"] == 3


def test_a_checkpoint_that_is_being_read_is_left_as_it_is(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_in_the_fourth_step(whole, tmp_path / "run", monkeypatch)
    monkeypatch.undo()
    before = (tmp_path / "run" / "events.jsonl").read_bytes()
    with monkeypatch.context() as patches:
        came = signal_at(patches, "armillary.checkpoint.tensors.read:_groups", 1)
        patches.setattr(
            "armillary.training.prepare.Preparation._settle", lambda *_: pytest.fail("loaded")
        )
        assert train(tmp_path, "run") == 75
        assert came()
    assert (tmp_path / "run" / "events.jsonl").read_bytes() == before
    assert train(tmp_path, "run") == 0
    assert steps_of(tmp_path / "run") == steps_of(whole / "whole")
