"""Which code and which libraries this is, for manifests. Imports no torch and starts no process."""

from __future__ import annotations

import platform
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from armillary.version import __version__

_LIBRARIES = ("torch", "numpy", "safetensors", "tokenizers")
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_PACKAGE = Path(__file__).parents[1]


@cache
def library_versions() -> dict[str, str]:
    """Package -> version."""
    found = {"python": platform.python_version(), "armillary": __version__}
    for package in _LIBRARIES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed as a package"
    return found


@cache
def code_version() -> dict[str, str | None]:
    """`version` of this package and the git `commit` of its source tree; None where there is none.

    Changes that are not committed do not show.
    """
    return {"version": __version__, "commit": _commit(_PACKAGE.parents[1] / ".git")}


def _commit(git: Path) -> str | None:
    """What HEAD points to, read from the files of a repository or of a linked work tree."""
    try:
        if git.is_file():
            git = git.parent / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref:"):
            return _whole_commit(head)
        name = head.removeprefix("ref:").strip()
        common = git
        if (git / "commondir").is_file():
            common = git / (git / "commondir").read_text(encoding="utf-8").strip()
        for folder in (git, common):
            if (folder / name).is_file():
                return _whole_commit((folder / name).read_text(encoding="utf-8").strip())
        packed = (common / "packed-refs").read_text(encoding="utf-8").splitlines()
        found = (line.split(" ")[0] for line in packed if line.endswith(f" {name}"))
        return _whole_commit(next(found, ""))
    except (OSError, ValueError):
        return None


def _whole_commit(text: str) -> str | None:
    return text if _COMMIT.fullmatch(text) else None
