"""Says once to people what went wrong, when several ranks see it.

Ranks that `launch.local` started hand their words to it, and it shows each text once. Elsewhere,
under torchrun for one, a rank can only speak for itself: what every rank is known to see is told by
one rank of each machine, the rest by whoever sees it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from armillary.foundation.errors import ArmillaryError

WORDS_VARIABLE = "ARMILLARY_LAST_WORDS"
"""Path of the file through which a rank tells its launcher why it ends."""


def tell(text: str, *, every_rank_sees_it: bool = False) -> None:
    """Shows `text` on standard error, or has the launcher show it."""
    path = os.environ.get(WORDS_VARIABLE)
    if path:
        with contextlib.suppress(OSError):  # the launcher is gone: say it here
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(text + "\n")
            return
    if every_rank_sees_it and os.environ.get("LOCAL_RANK", "0") != "0":
        return
    print(text, file=sys.stderr)


@contextlib.contextmanager
def seen_by_every_rank() -> Iterator[None]:
    """Around work that fails on every rank or on none, such as checks of the recipe."""
    try:
        yield
    except ArmillaryError as error:
        error.seen_by_every_rank = True
        raise
