"""Which checkpoint to resume from. Runs in one process; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from armillary.checkpoint.manifest import (
    MANIFEST_NAME,
    Unverified,
    data_prefix,
    step_name,
    step_names,
    step_of,
)
from armillary.checkpoint.places.open import is_remote, open_place, open_reachable
from armillary.checkpoint.places.place import Place
from armillary.checkpoint.verify import verify
from armillary.foundation.errors import Problem, UserError
from armillary.foundation.progress import Progress
from armillary.foundation.run_folder import CHECKPOINTS_FOLDER, RECIPE_FILE, checkpoints_address


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint whose every file was read and matched."""

    place: Place
    """The folder of checkpoints that it lies in."""
    name: str
    """Its name there."""
    step: int
    """Optimizer steps it has behind it."""
    manifest: dict[str, Any]
    """Its manifest; see `manifest`."""
    reasons: list[str]
    """Why this one: one line for it, after one for every newer one that was skipped."""

    @property
    def path(self) -> str:
        """Where it is, for people."""
        return path_of(self.place, self.name)

    @property
    def folder(self) -> str:
        """Name, in its place, of the folder that its files lie in."""
        return f"{self.name}/{data_prefix(self.manifest)}".rstrip("/")


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


def path_of(place: Place, name: str) -> str:
    """Where a checkpoint is, for people."""
    return f"{place.address.rstrip('/')}/{name}"


def find_checkpoint(
    place: Place, resume: str, progress: Progress | None = None, words: Words = _RESUME
) -> Found | None:
    """Resolves `--resume`, or what `words` call it, for a run whose checkpoints are in `place`.

    `auto`: the newest that verifies, None when there is none yet. `never`: None. Digits: that step
    of this run. Anything else is the path or address of a checkpoint, a run, or a folder of
    checkpoints.

    Raises:
        UserError: the one asked for is missing or damaged, or `auto` sees only damaged ones
            (starting over would throw away a run that may still be saved by hand).
    """
    if resume == "never":
        return None
    if resume == "auto":
        return _newest(place, progress, words)
    if resume.isascii() and resume.isdigit():
        return _by_step(place, int(resume), progress, words)
    return _by_address(resume, progress, words)


def open_checkpoints(address: str, asked: str = "") -> tuple[Place, str | None]:
    """The place that an address belongs to, and the name of a checkpoint in it that it means.

    The address is of a run, of a folder of checkpoints, or of one checkpoint (then with a name).

    Raises:
        UserError: there is no such folder; `asked` is what the message begins with.
    """
    if is_remote(address):
        return _open_remote(address.rstrip("/"))
    path = Path(address).expanduser()
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        others = "auto, never, a step number, or " if asked else ""
        allowed = f"{others}a path to a checkpoint or run folder"
        raise UserError(Problem(f"{asked or address} {what}", allowed))
    if (path / MANIFEST_NAME).exists() or step_of(path.name) is not None:
        path = path.absolute()
        return open_place(path.parent), path.name
    elsewhere = checkpoints_address(path)
    is_run = (path / RECIPE_FILE).is_file()
    if is_run or is_remote(elsewhere) or Path(elsewhere).is_dir():
        return open_reachable(elsewhere), None
    return open_place(path), None


def _open_remote(address: str) -> tuple[Place, str | None]:
    above, _, name = address.rpartition("/")
    if step_of(name) is not None:
        return open_reachable(above), name
    place = open_reachable(address)
    if CHECKPOINTS_FOLDER in place.folders():
        place = open_place(f"{address}/{CHECKPOINTS_FOLDER}")
    return place, None


def _newest(place: Place, progress: Progress | None, words: Words) -> Found | None:
    skipped: list[str] = []
    for step, name in step_names(place).items():
        path = path_of(place, name)
        try:
            manifest = verify(place, name, progress)
        except Unverified as reason:
            skipped.append(f"skipped {path}: {reason}")
            continue
        chosen = f"resuming from {path}: the newest checkpoint that verifies"
        return Found(place, name, step, manifest, [*skipped, chosen])
    if skipped:  # also without a manifest: a folder gets its name only once it has one
        raise UserError(
            Problem(
                f"no checkpoint in {place.address} verifies: " + "; ".join(skipped),
                "at least one undamaged checkpoint, or none at all",
                words.if_all_are_damaged,
            )
        )
    return None


def _by_step(place: Place, step: int, progress: Progress | None, words: Words) -> Found:
    named = step_names(place)
    asked = f"{words.option} {step}"
    if step not in named:
        raise UserError(
            Problem(
                f"{asked}: {place.address} has no checkpoint of step {step}",
                _available(place),
                f"{words.for_newest} takes the newest that verifies",
            )
        )
    return _verified(place, named[step], asked, progress, words)


def _by_address(address: str, progress: Progress | None, words: Words) -> Found:
    asked = f"{words.option} {address}"
    place, name = open_checkpoints(address, asked)
    if name is not None:
        return _verified(place, name, asked, progress, words)
    found = _newest(place, progress, words)
    if found is None:
        raise UserError(
            Problem(
                f"{asked}: no checkpoint in {place.address}",
                f"a folder with {MANIFEST_NAME}, or a run folder with"
                f" {CHECKPOINTS_FOLDER}/{step_name(20)} or the like",
            )
        )
    return found


def _verified(
    place: Place, name: str, asked: str, progress: Progress | None, words: Words
) -> Found:
    path = path_of(place, name)
    try:
        manifest = verify(place, name, progress)
    except Unverified as reason:
        raise UserError(
            Problem(
                f"{asked}: {path} does not verify: {reason}",
                _available(place),
                f"{words.for_newest} takes the newest that verifies",
            )
        ) from None
    return Found(place, name, manifest["step"], manifest, [f"resuming from {path}: {asked}"])


def _available(place: Place) -> str:
    steps = sorted(step_names(place))
    return "steps " + ", ".join(map(str, steps)) if steps else "none there yet"
