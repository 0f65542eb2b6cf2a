"""What reads files that others may have written, with valid ones to begin from.

Each target is a folder of valid files and a function that reads the folder as Armillary does. What
the function may raise are errors for people, and what the reader documents.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import torch

from armillary.checkpoint import rng
from armillary.checkpoint.config import Checkpoint
from armillary.checkpoint.manifest import Unverified, step_names
from armillary.checkpoint.places.open import open_place
from armillary.checkpoint.retention import read_pins, write_pins
from armillary.checkpoint.store import CheckpointStore
from armillary.checkpoint.tensors import flatten, stored_tensors
from armillary.cli import main as cli
from armillary.foundation.errors import EXIT_FINISHED, Problem, RunError
from armillary.foundation.run_folder import checkpoints_address
from armillary.parallel.schedules import read_table
from armillary.recipe.overrides import apply
from armillary.recipe.problems import problems
from armillary.recipe.recipe import Recipe
from armillary.recipe.registry import get
from armillary.recipe.toml import read_toml, to_toml
from armillary.resilience.guard_dump import (
    Replay,
    Rows,
    dump_folder,
    read_replay,
    write_replay,
    write_rows,
)
from armillary.training.resume import followed_before, remember_followed
from armillary.training.state import Position
from reliability import fuzz_inputs
from reliability.fuzz_data import DATA_TARGETS
from reliability.fuzz_target import Target
from telemetry_examples import start, step, validation

Mutate = Callable[[bytes, Random], bytes]

KINDS: dict[str, Mutate] = {
    ".json": fuzz_inputs.of_json,
    ".jsonl": fuzz_inputs.of_json_lines,
    ".toml": fuzz_inputs.of_toml,
    ".safetensors": fuzz_inputs.of_safetensors,
    ".npy": fuzz_inputs.of_array,
    ".jinja": fuzz_inputs.of_template,
}
"""Changes of structure, by what a file's name ends with."""

STEP = "step-00000004"


TENSORS = {"model": {"a": torch.arange(24.0).view(4, 6), "b": torch.ones(3, dtype=torch.bfloat16)}}


def make_checkpoint(folder: Path) -> None:
    """One whole checkpoint, with pins beside it."""
    with CheckpointStore(folder, Checkpoint(asynchronous=False)) as store:
        store.save(
            4,
            TENSORS,
            Position(step=4, jumped=[[1, 2]], recent=[[2.0, 1.0]]).scalars(),
            rng.capture(),
        )
        store.wait(raise_failure=True)
    write_pins(open_place(folder), [4])


def read_checkpoint(folder: Path) -> None:
    """As a run that resumes from it."""
    with CheckpointStore(folder, Checkpoint(asynchronous=False)) as store:
        found = store.find("4")
        assert found is not None
        stored_tensors(found.place, found.folder)
        wanted = {name: torch.zeros_like(each) for name, each in flatten(TENSORS).items()}
        scalars, states = store.load(found, wanted)
        Position.from_scalars(scalars, data_fingerprint="", path=found.path)
        if states is not None:
            rng.restore(states)


def resign(folder: Path, file: str, draw: Random) -> None:
    """The manifest agrees with the damaged file, and with itself; mostly."""
    path = folder / STEP / "manifest.json"
    if draw.random() < 0.2:
        return
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        manifest = json.loads(path.read_bytes())
        if file != f"{STEP}/manifest.json":
            data = (folder / file).read_bytes()
            entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            manifest["files"][Path(file).name] = entry
        body = {name: value for name, value in manifest.items() if name != "sha256"}
        text = json.dumps(body, sort_keys=True).encode()
        path.write_text(json.dumps({**body, "sha256": hashlib.sha256(text).hexdigest()}))


def read_recipe(folder: Path) -> None:
    """As any command that takes one; what passes is written and read again."""
    recipe = apply(Recipe(), [read_toml(folder / "recipe.toml")])
    if not problems(recipe, 8, data=False):
        (folder / "again.toml").write_text(to_toml(recipe), encoding="utf-8")
        assert apply(Recipe(), [read_toml(folder / "again.toml")]) == recipe
    checkpoints_address(folder)


def make_events(folder: Path) -> None:
    """A short run's log."""
    kinds = [("start", 0, start()), ("step", 1, step(1)), ("step", 2, step(2))]
    kinds += [("validation", 2, validation()), ("message", 2, {"message": "hello"})]
    saved = {"state": "durable", "path": "step-00000002", "bytes": 10, "seconds": 0.5}
    kinds += [("checkpoint", 2, saved), ("stop", 2, {"reason": "finished", "exit_code": 0})]
    lines = [
        json.dumps({"time": 1.7e9 + number, "kind": kind, "rank": 0, "step": at, **fields})
        for number, (kind, at, fields) in enumerate(kinds)
    ]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")


def read_events(folder: Path) -> None:
    """`armillary runs show` and `list`."""
    for typed in (["runs", "show", str(folder)], ["runs", "list", str(folder.parent), "--json"]):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            code = cli.main(typed)
        if code != EXIT_FINISHED:
            raise RunError(Problem("refused in words"))


def make_replay(folder: Path) -> None:
    """The dump of a bad step."""
    from armillary.data.batch import Batch
    from armillary.models.layers.documents import Documents

    replay = Replay(
        step=3, samples=(8, 10), kind="not finite", loss=float("nan"), gradient_norm=1.0,
        sample_ids=[5, 6], gradients={"0": ["a"]},
    )  # fmt: skip
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    documents = Documents.from_lengths([(4,), (1, 3)])
    batch = Batch(tokens=tokens, labels=tokens, documents=documents, sample_ids=(5, 6))
    write_rows(dump_folder(folder, 3), 0, [batch], [[0, 1]])
    write_replay(folder, replay)


def read_dump(folder: Path) -> None:
    """As `armillary replay` does before it computes."""
    replay = read_replay(folder, 3)
    first, end = replay.samples
    if 0 < end - first <= 100:
        Rows(dump_folder(folder, 3), end - first).batch([0, 1])


def make_followed(folder: Path) -> None:
    """A request to resume that was followed."""
    make_checkpoint(folder)
    remember_followed(folder, "4", Recipe(), 1)


def read_followed(folder: Path) -> None:
    """As `train --resume 4` does."""
    followed_before(folder, open_place(folder), "4", Recipe())
    step_names(open_place(folder))


def make_recipe(folder: Path) -> None:
    """One with lists of groups, of the larger ones."""
    (folder / "recipe.toml").write_text(to_toml(replace(get("starter"), seed=7)), encoding="utf-8")


def make_mixture_recipe(folder: Path) -> None:
    """One with experts."""
    (folder / "recipe.toml").write_text(to_toml(get("debug-qwen3-moe")), encoding="utf-8")


def make_table(folder: Path) -> None:
    """A pipeline's schedule."""
    (folder / "table.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")


CHECKPOINT = (
    *("manifest.json", "manifest.json", "tensors.json", "tensors.json"),
    *("rank-00000.safetensors", "state.json", "rng-00000.json"),
)
TARGETS = (
    Target(
        name="checkpoints: manifest, index, tensors, scalars, random states",
        share=31,
        files=tuple(f"{STEP}/{name}" for name in CHECKPOINT),
        make=make_checkpoint,
        read=read_checkpoint,
        repair=resign,
    ),
    Target(
        name="checkpoints: pins",
        share=4,
        files=("pins.json",),
        make=make_checkpoint,
        read=lambda folder: read_pins(open_place(folder)),
        documented=(Unverified,),
    ),
    Target(
        name="recipes, dense", share=5, files=("recipe.toml",), make=make_recipe, read=read_recipe
    ),
    Target(
        name="recipes, with experts",
        share=3,
        files=("recipe.toml",),
        make=make_mixture_recipe,
        read=read_recipe,
    ),
    Target(
        name="event logs", share=16, files=("events.jsonl",), make=make_events, read=read_events
    ),
    Target(
        name="dumps of bad steps",
        share=8,
        files=("guard/step-00000003/replay.json", "guard/step-00000003/rank-00000.safetensors"),
        make=make_replay,
        read=read_dump,
    ),
    Target(
        name="notes of followed requests",
        share=4,
        files=("resumed.json",),
        make=make_followed,
        read=read_followed,
    ),
    Target(
        name="schedules of pipelines",
        share=4,
        files=("table.csv",),
        make=make_table,
        read=lambda folder: read_table(str(folder / "table.csv")),
    ),
    *DATA_TARGETS,
)
assert sum(target.share for target in TARGETS) == 100
