"""What a kind of files is to `fuzz.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from armillary.foundation.errors import ArmillaryError


@dataclass(frozen=True, kw_only=True)
class Target:
    """One kind of file."""

    name: str
    """For people."""
    share: int
    """Of 100 inputs, how many it gets."""
    files: tuple[str, ...]
    """Files of its folder that are damaged, one at a time."""
    make: Callable[[Path], object]
    """Fills an empty folder."""
    read: Callable[[Path], object]
    """Reads it."""
    documented: tuple[type[Exception], ...] = (ArmillaryError,)
    """What reading may raise."""
    repair: Callable[[Path, str, Random], None] | None = None
    """Makes checksums right again, so that what they protect is reached too."""
