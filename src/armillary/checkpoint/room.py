"""Whether the checkpoints of a run will fit where they are to go. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import os

from armillary.checkpoint.config import Checkpoint
from armillary.checkpoint.places.place import Place, unique
from armillary.foundation.errors import Problem, UserError

_TRIAL_BYTES = 4096


def copies_needed(config: Checkpoint, there: int, total_steps: int) -> int:
    """Checkpoints for which there has to be room: those that stay, and the one being written.

    No more than the run will write.

    Of those that stay for good, one: how many there will be in the end is for people to plan.

    Args:
        config: what is kept.
        there: checkpoints that lie there already and make room as they go.
        total_steps: of the run.
    """
    kept = config.keep_last + config.keep_best
    kept += (config.ephemeral_every > 0) + (config.keep_every > 0)
    periods = (config.every, config.keep_every, config.ephemeral_every)
    saves = sum(total_steps // every for every in periods if every > 0) + 1  # the end is one
    return min(kept + 1 - min(there, kept), saves)  # one is written before the oldest goes


def require_room(place: Place, bytes_needed: int) -> None:
    """Writes a trial file and compares the free space with what is needed, before hours are spent.

    Raises:
        UserError: the place cannot be written to, or has too little room.
    """
    trial = f".trial-{unique()}"
    try:
        try:
            place.write(trial, [b"x" * _TRIAL_BYTES])
        finally:
            with contextlib.suppress(OSError):  # what went wrong before is what matters
                place.remove(trial)
        free = place.free_bytes()
    except OSError as error:
        raise UserError(_cannot_write(place, error)) from None
    if free is not None and free < bytes_needed:
        raise UserError(
            Problem(
                f"{place.address} has {_size(free)} free, but this run needs about"
                f" {_size(bytes_needed)}",
                "room for the checkpoints that are kept and the one being written",
                "free some space, choose another folder with --checkpoint.folder DIR,"
                " or keep fewer with --checkpoint.keep-last 1",
            )
        )


def _cannot_write(place: Place, error: OSError) -> Problem:
    elsewhere = "--checkpoint.folder elsewhere"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Problem(f"no space left in {place.address}", fix=f"free some space, or {elsewhere}")
    why = os.strerror(error.errno) if error.errno is not None else str(error)
    return Problem(
        f"checkpoints cannot be written to {place.address} ({why})",
        "a folder in which this user may make files",
        f"{elsewhere}, or change its permissions",
    )


def _size(amount: int) -> str:
    if amount < 10**9:
        return f"{amount / 1e6:.1f} MB"
    return f"{amount / 1e9:.1f} GB"
