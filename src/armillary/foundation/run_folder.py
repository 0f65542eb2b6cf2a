"""What the things in a run folder are called; docs/contracts.md promises these names."""

from __future__ import annotations

import tomllib
from pathlib import Path

RECIPE_FILE = "recipe.toml"
EVENTS_FILE = "events.jsonl"
CHECKPOINTS_FOLDER = "checkpoints"
TOKENIZER_FOLDER = "tokenizer"
IDENTITY_FILE = "run.json"

RUNS_FOLDER = "runs"
"""Where `train` puts the folders of runs to which no name was given."""


def named_run(path: Path) -> Path:
    """`path`, or the folder of that name below `runs`, where there is only that one."""
    below = RUNS_FOLDER / path
    return below if not path.exists() and below.is_dir() else path


def checkpoints_address(run: Path, folder: str | None = None) -> str:
    """Where the checkpoints of a run lie: a path, or an address such as s3://bucket/folder.

    Args:
        run: the run folder.
        folder: the recipe's `checkpoint.folder`; None: as the run's recipe.toml has it.
    """
    if folder is None:
        try:
            recipe = tomllib.loads((run / RECIPE_FILE).read_text(encoding="utf-8"))
            folder = str(recipe["checkpoint"]["folder"])
        except (OSError, ValueError, KeyError, TypeError):  # not a run, or one of older days
            folder = ""
    return folder or str(run / CHECKPOINTS_FOLDER)
