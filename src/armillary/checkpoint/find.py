"""Which checkpoint to resume from. Runs in one process; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from armillary.checkpoint.manifest import (
    MANIFEST_NAME,
    Unverified,
    step_folders,
    step_name,
    step_of,
    verify,
)
from armillary.foundation.errors import Problem, UserError
from armillary.foundation.progress import Progress
from armillary.foundation.run_folder import CHECKPOINTS_FOLDER


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint whose every file was read and matched."""

    path: Path
    """Its folder."""
    step: int
    """Optimizer steps it has behind it."""
    manifest: dict[str, Any]
    """Its manifest; see `manifest`."""
    reasons: list[str]
    """Why this one: one line for it, after one for every newer one that was skipped."""


@dataclass(frozen=True, slots=True)
class Words:
    """How people ask for a checkpoint, and what else they can do; for messages."""

    option: str = "--resume"
    for_newest: str = "--resume auto"
    if_all_are_damaged: str = (
        "restore a copy, resume from another run with --resume PATH,"
        " or start over with --resume never"
    )


_RESUME = Words()


def find_checkpoint(
    folder: Path, resume: str, progress: Progress | None = None, words: Words = _RESUME
) -> Found | None:
    """Resolves `--resume`, or what `words` call it, for a run whose checkpoints are in `folder`.

    `auto`: the newest that verifies, None when there is none yet. `never`: None. Digits: that step
    of this run. Anything else is a path to a checkpoint, a run, or a `checkpoints` folder.

    Raises:
        UserError: the one asked for is missing or damaged, or `auto` sees only damaged ones
            (starting over would throw away a run that may still be saved by hand).
    """
    if resume == "never":
        return None
    if resume == "auto":
        return _newest(folder, progress, words)
    if resume.isascii() and resume.isdigit():
        return _by_step(folder, int(resume), progress, words)
    return _by_path(Path(resume).expanduser(), progress, words)


def _newest(folder: Path, progress: Progress | None, words: Words) -> Found | None:
    skipped: list[str] = []
    for step, path in step_folders(folder).items():
        try:
            manifest = verify(path, progress)
        except Unverified as reason:
            skipped.append(f"skipped {path}: {reason}")
            continue
        chosen = f"resuming from {path}: the newest checkpoint that verifies"
        return Found(path, step, manifest, [*skipped, chosen])
    if skipped:  # also without a manifest: a folder gets its name only once it has one
        raise UserError(
            Problem(
                f"no checkpoint in {folder} verifies: " + "; ".join(skipped),
                "at least one undamaged checkpoint, or none at all",
                words.if_all_are_damaged,
            )
        )
    return None


def _by_step(folder: Path, step: int, progress: Progress | None, words: Words) -> Found:
    folders = step_folders(folder)
    asked = f"{words.option} {step}"
    if step not in folders:
        raise UserError(
            Problem(
                f"{asked}: {folder} has no checkpoint of step {step}",
                _available(folder),
                f"{words.for_newest} takes the newest that verifies",
            )
        )
    return _verified(folders[step], asked, progress, words)


def _by_path(path: Path, progress: Progress | None, words: Words) -> Found:
    asked = f"{words.option} {path}"
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        allowed = "auto, never, a step number, or a path to a checkpoint or run folder"
        raise UserError(Problem(f"{asked} {what}", allowed))
    if (path / MANIFEST_NAME).exists() or step_of(path.name) is not None:
        return _verified(path, asked, progress, words)
    inner = path / CHECKPOINTS_FOLDER if (path / CHECKPOINTS_FOLDER).is_dir() else path
    found = _newest(inner, progress, words)
    if found is None:
        raise UserError(
            Problem(
                f"{asked}: no checkpoint in {inner}",
                f"a folder with {MANIFEST_NAME}, or a run folder with"
                f" {CHECKPOINTS_FOLDER}/{step_name(20)} or the like",
            )
        )
    return found


def _verified(path: Path, asked: str, progress: Progress | None, words: Words) -> Found:
    try:
        manifest = verify(path, progress)
    except Unverified as reason:
        raise UserError(
            Problem(
                f"{asked}: {path} does not verify: {reason}",
                _available(path.parent),
                f"{words.for_newest} takes the newest that verifies",
            )
        ) from None
    return Found(path, int(manifest["step"]), manifest, [f"resuming from {path}: {asked}"])


def _available(folder: Path) -> str:
    steps = sorted(step_folders(folder))
    return "steps " + ", ".join(map(str, steps)) if steps else "none there yet"
