"""One run at a time in a run folder, and enough room in it. Imports no torch."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import uuid
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout

from armillary.foundation.errors import Problem, UserError
from armillary.foundation.files import write_atomically
from armillary.foundation.run_folder import EVENTS_FILE, RECIPE_FILE

LOCK_NAME = ".lock"
HOLDER_NAME = ".lock-holder.json"

# What shows that a folder is a run's: both are written before its first step.
_RUN_FILES = (RECIPE_FILE, EVENTS_FILE)
_CLAIM_FILES = {LOCK_NAME, HOLDER_NAME}


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
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # thread_local off: the claim may be released by another thread than took it.
        lock = FileLock(folder / LOCK_NAME, timeout=0, thread_local=False)
        lock.acquire()
    except Timeout:
        raise UserError(_in_use(folder)) from None
    except (OSError, NotImplementedError) as error:
        raise UserError(_cannot_write(folder, error)) from None
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    try:
        write_atomically(folder / HOLDER_NAME, json.dumps(holder) + "\n")
    except OSError as error:
        lock.release()
        raise UserError(_cannot_write(folder, error)) from None
    return RunClaim(folder, lock)


def check_space(folder: Path, bytes_needed: int) -> None:
    """Writes a trial file and compares the free space with what is needed, before hours are spent.

    Raises:
        UserError: `folder` cannot be written to, or has too little room.
    """
    trial = folder / f".trial-{uuid.uuid4().hex}"
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(trial, b"x" * 4096)
        finally:
            trial.unlink(missing_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise UserError(_cannot_write(folder, error)) from None
    if free < bytes_needed:
        raise UserError(
            Problem(
                f"{folder} has {_size(free)} free, but this run needs about {_size(bytes_needed)}",
                "room for the checkpoints that are kept and the one being written",
                "free some space, choose another folder with --run DIR,"
                " or keep fewer with --checkpoint.keep-last 1",
            )
        )


def _refuse_foreign(folder: Path) -> None:
    try:
        if not folder.exists():
            return
        if not folder.is_dir():
            raise UserError(Problem(f"run folder {folder} is a file", "a folder", "--run DIR"))
        names = {entry.name for entry in folder.iterdir()} - _CLAIM_FILES
    except OSError as error:
        raise UserError(_cannot_write(folder, error)) from None
    if names and not names.intersection(_RUN_FILES):
        example = ", ".join(sorted(names)[:3])
        raise UserError(
            Problem(
                f"run folder {folder} holds something other than a run ({example})",
                f"a new or empty folder, or one with {' or '.join(_RUN_FILES)}",
                "--run DIR with another name",
            )
        )


def _in_use(folder: Path) -> Problem:
    who = "another process"
    try:
        holder = json.loads((folder / HOLDER_NAME).read_text(encoding="utf-8"))
        who = f"process {holder['pid']} on {holder['host']} (since {holder['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        pass  # it has only just taken the lock, or is only just giving it back
    return Problem(
        f"run folder {folder} is in use by {who}",
        "one run at a time in a folder",
        "stop that run first, or choose another folder with --run DIR",
    )


def _cannot_write(folder: Path, error: Exception) -> Problem:
    number = getattr(error, "errno", None)
    why = os.strerror(number) if number is not None else str(error)
    if number == errno.ENOSPC:
        return Problem(f"no space left in {folder}", fix="free some space, or --run DIR elsewhere")
    return Problem(
        f"run folder {folder} cannot be written to ({why})",
        "a folder in which this user may make files",
        "--run DIR elsewhere, or change its permissions",
    )


def _size(amount: int) -> str:
    if amount < 10**9:
        return f"{amount / 1e6:.1f} MB"
    return f"{amount / 1e9:.1f} GB"
