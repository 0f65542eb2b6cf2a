"""From what a person types to a folder: `hf:OWNER/NAME` is looked up, a path is itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from armillary.foundation.errors import Problem, UserError, missing_extra

PREFIX = "hf:"

_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer*")
"""What is fetched: no code, no pickles."""
_CODE = ("*.py", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.model")
_NAME = re.compile(r"\w[\w.-]{0,95}(?:/\w[\w.-]{0,95})?(?:@\w[\w./-]{0,95})?", re.ASCII)


def is_hub(address: str) -> bool:
    """Whether an address is of the Hugging Face hub."""
    return address.startswith(PREFIX)


def folder_of(address: str) -> Path:
    """The folder that `hf:OWNER/NAME[@REVISION]`, or a path, means.

    Files of the hub are fetched into its own cache; without a network, those in it are taken.

    Raises:
        UserError: there is no such folder, or it cannot be had.
    """
    if not is_hub(address):
        folder = Path(address).expanduser()
        if not folder.is_dir():
            what = "is not a folder" if folder.exists() else "does not exist"
            raise UserError(Problem(f"{address} {what}", f"a folder, or {PREFIX}OWNER/NAME"))
        return folder
    name = address.removeprefix(PREFIX)
    if not _NAME.fullmatch(name):
        raise UserError(Problem(f"{address} names no model", f"{PREFIX}OWNER/NAME[@REVISION]"))
    try:
        import huggingface_hub
    except ImportError:
        raise missing_extra("hub", address) from None
    repository, _, revision = name.partition("@")
    wanted: dict[str, Any] = {
        "revision": revision or None,
        "allow_patterns": list(_PATTERNS),
        "ignore_patterns": list(_CODE),
    }
    try:
        return Path(huggingface_hub.snapshot_download(repository, **wanted))
    except Exception as error:  # the library raises whatever its own libraries do
        cached = _cached(repository, wanted)
        if cached is not None:
            return cached
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            Problem(
                f"cannot fetch {address}: {reason}",
                "a public model, or one that HF_TOKEN may read",
                "check the name and the network; offline, fetch it into the cache before",
            )
        ) from error


def _cached(repository: str, wanted: dict[str, Any]) -> Path | None:
    """What is in the cache already."""
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(repository, local_files_only=True, **wanted))
    except Exception:
        return None
