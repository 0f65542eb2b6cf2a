"""Which run this is: an id in its folder and in its manifests, so that no two share a place."""

from __future__ import annotations

import json
from pathlib import Path

from armillary.checkpoint.places.place import Place, unique
from armillary.checkpoint.retention import Shelved, shelved_in
from armillary.foundation.errors import ArmillaryError, Problem, UserError
from armillary.foundation.files import write_atomically
from armillary.foundation.run_folder import IDENTITY_FILE
from armillary.foundation.strict_json import parse_json
from armillary.telemetry.history import read_history


def identify(folder: Path, place: Place, *, resume: str, recipe_sha256: str) -> str:
    """The id of the run in a folder: that of its file, or else a new one; nothing is written.

    The same command in a folder that has saved nothing yet, where the checkpoints outside of it are
    all of one run of that very recipe, goes on with that run and has its id: a machine that was
    lost with its run folder is replaced so. Manifests without an id, of older versions, are ours.

    Args:
        folder: the run folder.
        place: where the run's checkpoints lie.
        resume: see `train`.
        recipe_sha256: of the recipe that is about to be trained.

    Raises:
        UserError: the place is outside of the run folder and holds another run's checkpoints.
    """
    own = _read(folder)
    if place.local is None or not place.local.resolve().is_relative_to(folder.resolve()):
        shelved = [each for each in shelved_in(place) if each.manifest.get("run") is not None]
        others = [each for each in shelved if each.manifest["run"] != own]
        if others:
            newest = max(others, key=lambda each: each.step)
            is_same = newest.manifest["recipe_sha256"] == recipe_sha256
            is_one = {each.manifest["run"] for each in shelved} == {newest.manifest["run"]}
            has_none = own is None or newest_told(folder)[0] == 0
            if not (resume == "auto" and is_same and is_one and has_none):
                raise UserError(_of_another(place, newest))
            own = newest.manifest["run"]
    if own is not None:
        return own
    name = "".join(letter for letter in folder.resolve().name if letter.isprintable())
    return f"{name}-{unique()}"


def remember(folder: Path, run: str) -> None:
    """Keeps the id in the folder, unless it is there."""
    if _read(folder) != run:
        write_atomically(folder / IDENTITY_FILE, json.dumps({"run": run}) + "\n")


def require_nothing_lost(folder: Path, place: Place) -> None:
    """For a run that is about to begin at step 0 as no checkpoint is there.

    Raises:
        UserError: its log tells of one, which would be trained once more from the beginning.
    """
    step, path = newest_told(folder)
    if step == 0:
        return
    there = f" at {path}" if path else ""
    raise UserError(
        Problem(
            f"the log of {folder} tells of a checkpoint of step {step}{there}, but there is none in"
            f" {place.address}",
            "the checkpoints where they were: is the disk mounted?",
            "--checkpoint.folder names where they are now; --resume PATH begins from another,"
            " --resume never starts over",
        )
    )


def newest_told(folder: Path) -> tuple[int, str]:
    """See `History.resumable`; 0 and "" where the log is absent or damaged."""
    try:
        return read_history(folder).resumable
    except (ArmillaryError, OSError, ValueError):
        return 0, ""


def _read(folder: Path) -> str | None:
    try:
        run = parse_json((folder / IDENTITY_FILE).read_bytes())["run"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return run if isinstance(run, str) and run.isprintable() else None


def _of_another(place: Place, theirs: Shelved) -> Problem:
    whose = f"step {theirs.step} of {theirs.manifest['created']} is of run {theirs.manifest['run']}"
    return Problem(
        f"{place.address} holds checkpoints of another run: {whose}",
        "a folder of checkpoints for each run",
        "another --checkpoint.folder; there, --resume"
        f" {place.address.rstrip('/')}/{theirs.name} begins from that one",
    )
