"""Which checkpoints stay, how they are published and how they go. Runs on rank 0; imports no torch.

Every step here survives a kill: a folder is moved to a `.tmp-` name before it is taken apart, and
a checkpoint that is replaced stays whole under a `.tmp-replaced-` name until its successor is in
place.
"""

from __future__ import annotations

import re
import shutil
import uuid
from pathlib import Path

from armillary.checkpoint.manifest import (
    Unverified,
    read_manifest,
    signature,
    step_folders,
    step_name,
    verify,
)
from armillary.foundation.files import sync_folder

_TEMPORARY = ".tmp-"
_REPLACED = ".tmp-replaced-"
_REMOVED = ".tmp-removed-"
_ASIDE = "set-aside-"
_LEFT_BEHIND = re.compile(r"\.tmp-(?:replaced-|removed-)?(?P<step>step-\d{8})-[0-9a-f]{12}")

Signature = tuple[tuple[str, int, int], ...]


class Shelf:
    """The folder that holds a run's checkpoints, as its only writer sees it."""

    def __init__(self, folder: Path, keep_last: int) -> None:
        assert keep_last >= 1, keep_last
        self.folder = folder
        self.keep_last = keep_last
        self._proven: dict[Path, Signature] = {}

    def open_temporary(self, step: int) -> Path:
        """A new, empty folder to write a checkpoint into."""
        path = self.folder / f"{_TEMPORARY}{step_name(step)}-{uuid.uuid4().hex[:12]}"
        path.mkdir(parents=True)
        return path

    def publish(self, temporary: Path, step: int) -> Path:
        """Gives a complete folder its name; durable on return."""
        final = self.folder / step_name(step)
        replaced = self._move_aside(final) if final.exists() else None
        try:
            temporary.rename(final)
        except BaseException:
            if replaced is not None:
                replaced.rename(final)
            raise
        sync_folder(self.folder)
        self._proven[final] = signature(final)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        return final

    def clean(self) -> list[Path]:
        """Puts back what a dead writer had moved aside, and removes what it left unfinished."""
        if not self.folder.is_dir():
            return []
        gone = []
        for path in sorted(self.folder.glob(f"{_TEMPORARY}*")):
            match = _LEFT_BEHIND.fullmatch(path.name)
            if match is None:
                continue
            final = self.folder / match.group("step")
            if path.name.startswith(_REPLACED) and not final.exists():
                path.rename(final)
                continue
            shutil.rmtree(path, ignore_errors=True)
            gone.append(path)
        sync_folder(self.folder)
        return gone

    def thin(self, just_written: int) -> list[tuple[Path, int]]:
        """Removes finished checkpoints older than the `keep_last` newest that verify.

        A damaged one does not count. Foreign names and folders without an intact manifest are not
        ours to touch, and the step just written stays even where higher steps lie beside it.
        Returns the removed paths with their bytes.
        """
        verified = 0
        removed = []
        for step, path in step_folders(self.folder).items():
            if verified < self.keep_last:
                verified += self._verifies(path)
                continue
            if step == just_written:
                continue
            try:
                manifest = read_manifest(path)
            except Unverified:
                continue
            self._remove(path)
            removed.append((path, sum(int(file["bytes"]) for file in manifest["files"].values())))
        return removed

    def set_aside_after(self, step: int) -> list[Path]:
        """Renames checkpoints newer than `step`, so that they no longer belong to this run."""
        moved = []
        for later, path in step_folders(self.folder).items():
            if later > step:
                aside = self.folder / f"{_ASIDE}{path.name}-{uuid.uuid4().hex[:12]}"
                path.rename(aside)
                moved.append(aside)
        if moved:
            sync_folder(self.folder)
        return moved

    def _verifies(self, path: Path) -> bool:
        """Hashes a folder once, then again only after somebody has written to it."""
        seen = signature(path)
        if self._proven.get(path) == seen:
            return True
        try:
            verify(path)
        except Unverified:
            return False
        self._proven[path] = seen
        return True

    def _move_aside(self, final: Path) -> Path:
        replaced = self.folder / f"{_REPLACED}{final.name}-{uuid.uuid4().hex[:12]}"
        self._proven.pop(final, None)
        return final.rename(replaced)

    def _remove(self, path: Path) -> None:
        doomed = self.folder / f"{_REMOVED}{path.name}-{uuid.uuid4().hex[:12]}"
        self._proven.pop(path, None)
        path.rename(doomed)
        sync_folder(self.folder)
        shutil.rmtree(doomed)
