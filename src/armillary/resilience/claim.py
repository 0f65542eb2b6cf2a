"""One run at a time in a run folder. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout

from armillary.foundation.errors import Problem, UserError
from armillary.foundation.files import write_atomically
from armillary.foundation.run_folder import (
    CHECKPOINTS_FOLDER,
    EVENTS_FILE,
    IDENTITY_FILE,
    RECIPE_FILE,
)

LOCK_NAME = ".lock"
HOLDER_NAME = ".lock-holder.json"

# What shows that a folder is a run's: both are written before its first step.
_RUN_FILES = (RECIPE_FILE, EVENTS_FILE)
# What a start leaves that ended before it wrote anything.
_CLAIM_FILES = {LOCK_NAME, HOLDER_NAME, CHECKPOINTS_FOLDER, IDENTITY_FILE}


@dataclass(frozen=True, slots=True)
class _Words:
    """What a folder is called in messages, and the option that names it."""

    what: str
    option: str


_RUN = _Words("run folder", "--run DIR")
_CHECKPOINTS = _Words("checkpoints folder", "--checkpoint.folder DIR")


class RunClaim:
    """The claim of this process on a run folder; ends with `release`, or with the process.

    The system holds the lock, so nothing is left behind by a kill. Rank 0 claims for all ranks.
    """

    def __init__(self, folder: Path, lock: FileLock) -> None:
        self.folder = folder
        self._lock = lock

    def release(self) -> None:
        """Gives the folder back."""
        if self._lock.is_locked:
            with contextlib.suppress(OSError):  # a disk that failed; the lock ends all the same
                (self.folder / HOLDER_NAME).unlink(missing_ok=True)
            self._lock.release()

    def __enter__(self) -> RunClaim:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def claim_run(folder: Path) -> RunClaim:
    """Makes a run folder, or takes one that exists and is free.

    Raises:
        UserError: another process has it, it holds something other than a run, or it cannot be
            written to. Nothing that was there before has changed.
    """
    _refuse_foreign(folder)
    return _lock(folder, _RUN)


def claim_checkpoints(folder: Path) -> RunClaim:
    """The same for a folder of checkpoints that is not in the run folder, whatever it holds.

    Raises:
        UserError: another process has it, or it cannot be written to.
    """
    return _lock(folder, _CHECKPOINTS)


def _lock(folder: Path, words: _Words) -> RunClaim:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # thread_local off: the claim may be released by another thread than took it.
        lock = FileLock(folder / LOCK_NAME, timeout=0, thread_local=False)
        lock.acquire()
    except Timeout:
        raise UserError(_in_use(folder, words)) from None
    except (OSError, NotImplementedError) as error:
        raise UserError(_cannot_write(folder, error, words)) from None
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    try:
        write_atomically(folder / HOLDER_NAME, json.dumps(holder) + "\n")
    except OSError as error:
        lock.release()
        raise UserError(_cannot_write(folder, error, words)) from None
    return RunClaim(folder, lock)


def _refuse_foreign(folder: Path) -> None:
    try:
        if not folder.exists():
            return
        if not folder.is_dir():
            raise UserError(Problem(f"run folder {folder} is a file", "a folder", "--run DIR"))
        names = {entry.name for entry in folder.iterdir()} - _CLAIM_FILES
    except OSError as error:
        raise UserError(_cannot_write(folder, error, _RUN)) from None
    if names and not names.intersection(_RUN_FILES):
        example = ", ".join(sorted(names)[:3])
        raise UserError(
            Problem(
                f"run folder {folder} holds something other than a run ({example})",
                f"a new or empty folder, or one with {' or '.join(_RUN_FILES)}",
                "--run DIR with another name",
            )
        )


def _in_use(folder: Path, words: _Words) -> Problem:
    who = "another process"
    try:
        holder = json.loads((folder / HOLDER_NAME).read_text(encoding="utf-8"))
        who = f"process {holder['pid']} on {holder['host']} (since {holder['since']})"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass  # it has only just taken the lock, or is only just giving it back
    return Problem(
        f"{words.what} {folder} is in use by {who}",
        "one run at a time in a folder",
        f"stop that run first, or choose another folder with {words.option}",
    )


def _cannot_write(folder: Path, error: Exception, words: _Words) -> Problem:
    number = getattr(error, "errno", None)
    why = os.strerror(number) if number is not None else str(error)
    if number == errno.ENOSPC:
        return Problem(f"no space left in {folder}", fix=f"free some space, or {words.option}")
    return Problem(
        f"{words.what} {folder} cannot be written to ({why})",
        "a folder in which this user may make files",
        f"{words.option} elsewhere, or change its permissions",
    )
