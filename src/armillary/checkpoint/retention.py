"""Which checkpoints stay. Runs on rank 0; imports no torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from armillary.checkpoint.config import Checkpoint
from armillary.checkpoint.find import path_of
from armillary.checkpoint.manifest import (
    Unreadable,
    Unverified,
    read_manifest,
    reason_of,
    step_names,
)
from armillary.checkpoint.places.place import Place
from armillary.checkpoint.verify import verify
from armillary.foundation.strict_json import parse_json

PINS_FILE = "pins.json"
"""Beside the checkpoints: those that a person has asked to keep."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shelved:
    """A checkpoint that lies there, by its manifest alone."""

    step: int
    name: str
    manifest: Mapping[str, Any]

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(entry["bytes"] for entry in self.manifest["files"].values())


class Shelf:
    """The checkpoints of a run, as the one who may remove some sees them."""

    def __init__(self, place: Place, keep: Checkpoint) -> None:
        self.place = place
        self._keep = keep
        self._known: dict[str, tuple[tuple[object, ...], bool]] = {}
        """By name: what the files looked like when they were read, and whether all was right."""

    def trust(self, name: str) -> None:
        """Takes a checkpoint for verified that was just proven, until somebody writes to it."""
        self._known[name] = self.place.signature(name), True

    def thin(self, just_written: int, *, dry_run: bool = False) -> list[Shelved]:
        """Removes what nothing keeps; returns that.

        Kept are: those down to the last of the `keep_last` that verify, of which ephemeral ones
        stay while nothing newer verifies; the `keep_best` with the best scores, of those that
        verify, and any that is as good and cannot be read for now; permanent ones; pinned ones; the
        one just written, even where higher steps lie beside it. Foreign names and folders without
        an intact manifest are not ours to touch.

        Raises:
            Unverified: the list of pins cannot be read, so nothing may go.
        """
        shelved = shelved_in(self.place)
        pinned = read_pins(self.place)
        stays = {just_written, *pinned, *self._newest(shelved), *self._best(shelved)}
        doomed = [
            each for each in shelved if each.step not in stays and not self._is_permanent(each)
        ]
        for each in doomed:
            if not dry_run:
                self._known.pop(each.name, None)
                self.place.remove(each.name)
        return doomed

    def set_aside_after(self, step: int) -> list[str]:
        """Renames checkpoints newer than `step`, so that they no longer belong to this run.

        Returns where they are now.
        """
        later = [name for other, name in step_names(self.place).items() if other > step]
        return [path_of(self.place, self.place.set_aside(name)) for name in later]

    def _newest(self, shelved: Collection[Shelved]) -> set[int]:
        """Down to the last of the `keep_last` that verify; damaged ones among them stay as well."""
        newest: set[int] = set()
        counted, is_proven = 0, False
        for each in shelved:
            if counted == self._keep.keep_last:
                break
            is_ephemeral = each.manifest["kind"] == "ephemeral"
            if is_ephemeral and is_proven:
                continue
            newest.add(each.step)
            if self._verifies(each.name):
                is_proven = True
                counted += not is_ephemeral
        return newest

    def _best(self, shelved: Collection[Shelved]) -> set[int]:
        metric = self._keep.best_metric
        scored = [each for each in shelved if metric in each.manifest["scores"]]
        scored.sort(key=lambda each: (each.manifest["scores"][metric], -each.step))
        best: set[int] = set()
        counted = 0
        for each in scored:
            if counted == self._keep.keep_best:
                break
            verifies = self._verifies(each.name)
            if verifies is not False:
                best.add(each.step)
            counted += verifies is True
        return best

    def _is_permanent(self, each: Shelved) -> bool:
        every = self._keep.keep_every
        return each.manifest["kind"] == "permanent" or (every > 0 and each.step % every == 0)

    def _verifies(self, name: str) -> bool | None:
        """Reads a checkpoint once, then again only after somebody has written to it.

        None: it cannot be read for now.
        """
        seen = self.place.signature(name)
        before, verdict = self._known.get(name, (None, False))
        if before == seen:
            return verdict
        try:
            verify(self.place, name)
            verdict = True
        except Unreadable:
            return None
        except Unverified:
            verdict = False
        self._known[name] = seen, verdict
        return verdict


def shelved_in(place: Place) -> list[Shelved]:
    """Checkpoints in a place with an intact manifest, newest first; their files are not read."""
    found = []
    for step, name in step_names(place).items():
        try:
            found.append(Shelved(step=step, name=name, manifest=read_manifest(place, name)))
        except Unverified:
            continue
    return found


def read_pins(place: Place) -> set[int]:
    """Steps whose checkpoints are never removed.

    Raises:
        Unverified: the list is there and cannot be read.
    """
    try:
        pins = parse_json(place.read(PINS_FILE, length=2**20))["pinned"]
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except OSError as error:
        raise Unverified(f"{PINS_FILE} is unreadable ({reason_of(error)})") from None
    except (ValueError, KeyError, TypeError):
        raise Unverified(f"{PINS_FILE} is not a list of pinned steps") from None
    if not isinstance(pins, list) or not all(type(step) is int and step >= 0 for step in pins):
        raise Unverified(f"{PINS_FILE} is not a list of pinned steps")
    return set(pins)


def write_pins(place: Place, steps: Collection[int]) -> None:
    """Replaces the list of pinned steps."""
    place.write(PINS_FILE, [(json.dumps({"pinned": sorted(steps)}) + "\n").encode()])
