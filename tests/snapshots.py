"""Snapshots of text, kept as plain files. `ARMILLARY_UPDATE_SNAPSHOTS=1 pytest` rewrites them."""

from __future__ import annotations

import os
from pathlib import Path

UPDATE_VARIABLE = "ARMILLARY_UPDATE_SNAPSHOTS"


def assert_matches_snapshot(text: str, path: Path | str) -> None:
    """Compares `text` with the file at `path`, exactly, up to one newline at the end.

    Replace what differs from machine to machine (folders, times, versions) before the call. A
    snapshot that does not exist fails: it is written only when the update variable is set.
    """
    file = Path(path)
    wanted = text.rstrip("\n") + "\n"
    if os.environ.get(UPDATE_VARIABLE) == "1":
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(wanted, encoding="utf-8")
        return
    assert file.exists(), f"no snapshot {file}; write it with {UPDATE_VARIABLE}=1:\n{wanted}"
    assert wanted == file.read_text(encoding="utf-8"), f"differs from snapshot {file}"
