"""What the things in a run folder are called; docs/contracts.md promises these names."""

from __future__ import annotations

from pathlib import Path

RECIPE_FILE = "recipe.toml"
EVENTS_FILE = "events.jsonl"
CHECKPOINTS_FOLDER = "checkpoints"
TOKENIZER_FOLDER = "tokenizer"

RUNS_FOLDER = "runs"
"""Where `train` puts the folders of runs to which no name was given."""


def named_run(path: Path) -> Path:
    """`path`, or the folder of that name below `runs`, where there is only that one."""
    below = RUNS_FOLDER / path
    return below if not path.exists() and below.is_dir() else path
