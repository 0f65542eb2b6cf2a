"""What makes a folder a checkpoint: a manifest, written last, that every file agrees with.

The manifest is one JSON object: `format`, `step`, `tokens_total`, `cursor`, `files` (relative path
-> `bytes`, `sha256`), `recipe_sha256`, `created`, `kind`, `scores`, `code`, `versions`,
`provenance`, `run` (an id; not in older ones), whatever else the caller gave, and `sha256` over all
of that, so that a flipped bit in the manifest itself shows too. Whoever made a manifest, reading it
ends in `Unverified` or in one whose fields are of the kinds in `_FIELDS`. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from armillary.checkpoint.code_version import code_version, library_versions
from armillary.checkpoint.places.place import MANIFEST, Place, Written
from armillary.foundation.strict_json import parse_json

FORMAT = 2
MANIFEST_NAME = MANIFEST
STATE_NAME = "state.json"
KINDS = ("kept", "permanent", "ephemeral", "final")
"""What retention makes of a checkpoint: of the newest few, for good, until a newer one, the end."""

_STEP_NAME = re.compile(r"step-(\d{8})", re.ASCII)
_FILE_NAME = re.compile(r"(?:(?!\.{1,2}/)[\w.-]{1,200}/){0,3}(?!\.{1,2}$)[\w.-]{1,200}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_OWN_FIELDS = ("format", "step", "files", "sha256")
_LARGEST_MANIFEST = 256 * 2**20  # bytes: a million files


class Unverified(Exception):
    """A folder is not a checkpoint; the message says why, for a person."""


class Unreadable(Unverified):
    """It may be one: the machine, the disk or the store failed while it was read."""


def step_name(step: int) -> str:
    """Folder name of a step's checkpoint."""
    assert 0 <= step < 10**8, step
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step in a folder name of ours; None for any other name."""
    match = _STEP_NAME.fullmatch(name)
    return int(match.group(1)) if match else None


def step_names(place: Place) -> dict[int, str]:
    """Folders in a place that are named like checkpoints, newest first, verified or not."""
    named = {step: name for name in place.folders() if (step := step_of(name)) is not None}
    return dict(sorted(named.items(), reverse=True))


def holds_weights_only(manifest: Mapping[str, Any]) -> bool:
    """Whether it has no state of optimizers and data: training from it begins at step 0."""
    return manifest.get("weights_only") is True


def rng_name(rank: int) -> str:
    """File name of a rank's random states."""
    return f"rng-{rank:05d}.json"


def compose(
    step: int,
    files: Mapping[str, Written],
    scalars: Mapping[str, Any],
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """The manifest of a checkpoint; `given` adds fields or replaces defaults, never our own.

    A score that is not finite is left out: it is nobody's best.
    """
    taken = [name for name in _OWN_FIELDS if name in given]
    assert not taken, f"the store writes these manifest fields itself: {taken}"
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "step": step,
        "tokens_total": scalars.get("tokens_total"),
        "cursor": scalars.get("cursor"),
        "files": {
            name: {"bytes": files[name].bytes, "sha256": files[name].sha256}
            for name in sorted(files)
        },
        "recipe_sha256": None,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "kind": "kept",
        "code": code_version(),
        "versions": library_versions(),
        "provenance": {"from": "scratch"},
        **given,
        "scores": {n: s for n, s in given.get("scores", {}).items() if math.isfinite(s)},
    }
    manifest["sha256"] = _own_digest(manifest)
    return manifest


def render(manifest: Mapping[str, Any]) -> bytes:
    """The manifest as it lies on disk."""
    return (json.dumps(manifest, indent=1, allow_nan=False) + "\n").encode()


def read_manifest(place: Place, name: str) -> dict[str, Any]:
    """The manifest of a step folder, itself intact; the files it names are not looked at.

    Raises:
        Unverified: absent, unreadable, damaged, of another format, or of another step.
    """
    try:
        data = place.read(f"{name}/{MANIFEST_NAME}", length=_LARGEST_MANIFEST + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise Unverified(f"no {MANIFEST_NAME}") from None
    except OSError as error:
        raise Unverified(f"{MANIFEST_NAME} is unreadable ({reason_of(error)})") from None
    manifest = parse_manifest(data)
    named = step_of(name.rpartition("/")[2])
    if named is not None and named != manifest["step"]:
        raise Unverified(f"{MANIFEST_NAME} is of step {manifest['step']}")
    return manifest


def parse_manifest(data: bytes) -> dict[str, Any]:
    """The manifest that these bytes are, every field of the kind that readers count on.

    Raises:
        Unverified: they are none, or one of another format.
    """
    if len(data) > _LARGEST_MANIFEST:
        raise Unverified(f"{MANIFEST_NAME} is too large to be one")
    try:
        manifest = parse_json(data)
    except ValueError as error:
        raise Unverified(f"{MANIFEST_NAME} is unreadable ({error})") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise Unverified(f"{MANIFEST_NAME} is not a manifest")
    if manifest.get("format") != FORMAT:
        raise Unverified(_of_another_format(manifest.get("format")))
    if manifest.get("sha256") != _own_digest(manifest):
        raise Unverified(f"{MANIFEST_NAME} does not match its own checksum")
    for field, is_right in _FIELDS.items():
        if field not in manifest or not is_right(manifest[field]):
            raise Unverified(f"{MANIFEST_NAME} has no proper {field!r}")
    if not _is_text_or_none(manifest.get("run")):  # not there in older ones
        raise Unverified(f"{MANIFEST_NAME} has no proper 'run'")
    for name, entry in manifest["files"].items():
        _require_file_entry(name, entry)
    data_prefix(manifest)
    return manifest


def data_prefix(manifest: Mapping[str, Any]) -> str:
    """What the names of a checkpoint's files begin with: "", or the folder of the attempt.

    Raises:
        Unverified: there is no single one.
    """
    folders = {name.rpartition("/")[0] for name in manifest["files"]}
    if len(folders) != 1:
        raise Unverified(f"{MANIFEST_NAME} names files in {len(folders)} folders")
    folder = folders.pop()
    prefix = f"{folder}/" if folder else ""
    if f"{prefix}{STATE_NAME}" not in manifest["files"]:
        raise Unverified(f"{MANIFEST_NAME} names no {STATE_NAME}")
    return prefix


def reason_of(error: OSError) -> str:
    """Why a file could not be read, in words."""
    return error.strerror or str(error) or type(error).__name__


def _of_another_format(found: object) -> str:
    if found == 1:
        return f"format 1, whose tensors lie in a pickle, is not read; this version reads {FORMAT}"
    return f"format {found!r:.40}; this version reads {FORMAT}"


def _require_file_entry(name: str, entry: object) -> None:
    if name == MANIFEST_NAME or not _FILE_NAME.fullmatch(name):
        raise Unverified(f"{MANIFEST_NAME} names a file outside the folder: {name[:80]!r}")
    if (
        not isinstance(entry, dict)
        or not _is_count(entry.get("bytes"))
        or not isinstance(entry.get("sha256"), str)
        or not _SHA256.fullmatch(entry["sha256"])
    ):
        raise Unverified(f"{MANIFEST_NAME} has no bytes and sha256 of {name}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_text_or_none(value: object) -> bool:
    return value is None or _is_text(value)


def _is_text(value: object) -> bool:
    """Whether it can be shown: no lone surrogates, no escape codes for a terminal."""
    return isinstance(value, str) and value.isprintable()


def _is_table_of(value: object, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(_is_text(n) and is_right(v) for n, v in value.items())


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "step": lambda value: _is_count(value) and value < 10**8,
    "tokens_total": lambda value: value is None or _is_count(value),
    "cursor": lambda value: True,
    "recipe_sha256": _is_text_or_none,
    "created": _is_text,
    "kind": lambda value: value in KINDS,
    "scores": lambda value: _is_table_of(value, _is_number),
    "code": lambda value: _is_table_of(value, _is_text_or_none),
    "versions": lambda value: isinstance(value, dict),
    "provenance": lambda value: isinstance(value, dict),
}
"""What every manifest has, and what it may be."""


def _own_digest(manifest: Mapping[str, Any]) -> str:
    body = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
