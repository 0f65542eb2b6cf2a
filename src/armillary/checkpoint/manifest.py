"""What makes a folder a checkpoint: a manifest, written last, that every file agrees with.

The manifest is one JSON object: `format`, `step`, `tokens_total`, `cursor`, `files` (relative path
-> `bytes`, `sha256`), `recipe_sha256`, `created`, `versions`, `provenance`, whatever else the
caller gave, and `sha256` over all of that, so that a flipped bit in the manifest itself shows too.
Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any

from armillary.foundation.files import sha256_of
from armillary.foundation.progress import NoProgress, Progress

FORMAT = 1
MANIFEST_NAME = "manifest.json"
STATE_NAME = "state.json"

_STEP_NAME = re.compile(r"step-(\d{8})")
_OWN_FIELDS = ("format", "step", "files", "sha256")


class Unverified(Exception):
    """A folder is not a checkpoint; the message says why, for a person."""


def step_name(step: int) -> str:
    """Folder name of a step's checkpoint."""
    assert 0 <= step < 10**8, step
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step in a folder name of ours; None for any other name."""
    match = _STEP_NAME.fullmatch(name)
    return int(match.group(1)) if match else None


def step_folders(folder: Path) -> dict[int, Path]:
    """Folders inside `folder` that are named like checkpoints, newest first, verified or not."""
    try:
        entries = [entry for entry in folder.iterdir() if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    named = {step: entry for entry in entries if (step := step_of(entry.name)) is not None}
    return dict(sorted(named.items(), reverse=True))


def rng_name(rank: int) -> str:
    """File name of a rank's random states."""
    return f"rng-{rank:05d}.json"


def list_files(folder: Path) -> list[str]:
    """Relative paths of all files below `folder`, sorted."""
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """`files` entries (bytes, sha256) of some files of a folder; hashes in threads."""
    names = list(names)
    with ThreadPoolExecutor(max_workers=_hash_threads()) as pool:
        digests = list(pool.map(lambda name: sha256_of(folder / name), names))
    return {
        name: {"bytes": (folder / name).stat().st_size, "sha256": digest}
        for name, digest in zip(names, digests, strict=True)
    }


def compose(
    step: int,
    files: Mapping[str, Mapping[str, Any]],
    scalars: Mapping[str, Any],
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """The manifest of a checkpoint; `given` adds fields or replaces defaults, never our own."""
    taken = [name for name in _OWN_FIELDS if name in given]
    assert not taken, f"the store writes these manifest fields itself: {taken}"
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "step": step,
        "tokens_total": scalars.get("tokens_total"),
        "cursor": scalars.get("cursor"),
        "files": {name: dict(files[name]) for name in sorted(files)},
        "recipe_sha256": None,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": _versions(),
        "provenance": {"from": "scratch"},
        **given,
    }
    manifest["sha256"] = _own_digest(manifest)
    return manifest


def render(manifest: Mapping[str, Any]) -> str:
    """The manifest as it lies on disk."""
    return json.dumps(manifest, indent=1) + "\n"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a step folder, itself intact; the files it names are not looked at.

    Raises:
        Unverified: absent, unreadable, damaged, of a newer format, or of another step.
    """
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Unverified(f"no {MANIFEST_NAME}") from None
    except (OSError, ValueError) as error:
        raise Unverified(f"{MANIFEST_NAME} is unreadable ({error})") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise Unverified(f"{MANIFEST_NAME} is not a manifest")
    if manifest.get("format") != FORMAT:
        raise Unverified(f"format {manifest.get('format')!r}; this version reads {FORMAT}")
    if manifest.get("sha256") != _own_digest(manifest):
        raise Unverified(f"{MANIFEST_NAME} does not match its own checksum")
    named = step_of(folder.name)
    if named is not None and named != manifest["step"]:
        raise Unverified(f"the manifest is of step {manifest['step']}")
    return manifest


def verify(folder: Path, progress: Progress | None = None) -> dict[str, Any]:
    """The manifest of a step folder, after every file was read and matched.

    Raises:
        Unverified: the first thing that is wrong.
    """
    manifest = read_manifest(folder)
    files: dict[str, dict[str, Any]] = manifest["files"]
    for name, entry in files.items():
        _check_size(folder, name, entry)
    total = sum(int(entry["bytes"]) for entry in files.values())
    label = f"verifying {folder.name}"
    with (
        (progress or NoProgress()).task(label, total, "bytes") as advance,
        ThreadPoolExecutor(max_workers=_hash_threads()) as pool,
    ):
        digests = pool.map(lambda name: _digest_or_reason(folder / name), files)
        try:
            for (name, entry), digest in zip(files.items(), digests, strict=True):
                if digest != entry["sha256"]:
                    wrong = digest if " " in digest else "does not match its checksum"
                    raise Unverified(f"{name} {wrong}")
                advance(int(entry["bytes"]))
        finally:  # `advance` may raise too, when a stop was asked for
            pool.shutdown(cancel_futures=True)
    return manifest


def signature(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and modification times: equal while nobody has written to the folder."""
    stats = ((name, (folder / name).stat()) for name in list_files(folder))
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _check_size(folder: Path, name: str, entry: Mapping[str, Any]) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise Unverified(f"the manifest names a file outside the folder: {name}")
    try:
        size = (folder / name).stat().st_size
    except OSError as error:
        raise Unverified(f"{name} is missing ({error.strerror})") from None
    if size != entry["bytes"]:
        raise Unverified(f"{name} has {size} bytes instead of {entry['bytes']}")


def _digest_or_reason(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        return f"is unreadable ({error.strerror})"


def _own_digest(manifest: Mapping[str, Any]) -> str:
    body = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _hash_threads() -> int:
    return min(8, os.cpu_count() or 1)


@cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("armillary", "torch", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed as a package"
    return versions
