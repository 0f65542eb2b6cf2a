"""The checkpoints of one run: saved in the background, published whole, found by proof.

The order of a write, and why a kill at any point harms nothing: tensors, random states and
`state.json` go into a `.tmp-` folder; then their checksums into `manifest.json`; files and folder
are fsynced; the folder is renamed to `step-00000020`; the parent is fsynced. Only then is it
durable.
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor

from armillary.checkpoint.find import Found, find_checkpoint
from armillary.checkpoint.manifest import (
    MANIFEST_NAME,
    STATE_NAME,
    compose,
    describe_files,
    list_files,
    render,
    rng_name,
    step_name,
)
from armillary.checkpoint.ranks import Failure, Ranks, describe
from armillary.checkpoint.retention import Shelf
from armillary.checkpoint.tensors import (
    flatten,
    held_by_all,
    logical_bytes,
    read_tensors,
    require_match,
    stage,
    stored_tensors,
    write_tensors,
)
from armillary.foundation.errors import Problem, RunError
from armillary.foundation.files import sync_folder, write_atomically
from armillary.foundation.progress import Progress

T = TypeVar("T")

OnEvent = Callable[[str, dict[str, Any]], None]
OnStage = Callable[[str], None]

STAGES = ("open", "tensors", "rng", "state", "checksums", "manifest", "publish", "thin")
"""What a write goes through, in order; `on_stage` hears of each before it begins."""


@dataclass(frozen=True, slots=True)
class _Save:
    """All that one write needs; training may change everything else meanwhile."""

    step: int
    tensors: dict[str, Tensor]
    scalars: dict[str, Any]
    rng: bytes
    manifest: dict[str, Any]
    began: float
    staged_after: float | None
    """Seconds until training could go on; None: it waits for the whole write."""
    staging_failure: str | None


class CheckpointStore:
    """The checkpoints in a run's `checkpoints` folder. Every rank makes one and calls it alike.

    Args:
        folder: the `checkpoints` folder itself; made on the first save.
        keep_last: newest verified checkpoints that stay.
        asynchronous: write in a thread, from a copy; else in `save`, from the tensors themselves.
        on_event: called on rank 0 with `checkpoint` or `warning` and the fields of
            docs/contracts.md, `step` among them; from the writing thread when asynchronous.
        on_stage: told each of `STAGES` on each rank; for tests, which make it fail.
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int = 2,
        asynchronous: bool = True,
        on_event: OnEvent | None = None,
        *,
        on_stage: OnStage | None = None,
    ) -> None:
        self.folder = folder
        self.asynchronous = asynchronous
        self.durable_step: int | None = None
        """The step of the newest save that was published whole; None before the first."""
        self._on_event = on_event or (lambda kind, fields: None)
        self._on_stage = on_stage or (lambda stage: None)
        self._shelf = Shelf(folder, keep_last)
        self._ranks = Ranks()  # of its own: saves agree in a thread
        self._thread: threading.Thread | None = None
        self._failure: str | None = None

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def clean(self) -> None:
        """Clears up after a writer that died. Only for the run that has claimed the folder."""
        self._on_main(self._shelf.clean)

    def set_aside_after(self, step: int) -> list[Path]:
        """Renames checkpoints newer than `step` to `set-aside-...`.

        For a run that deliberately resumes from an older one: left in place, the newer ones would
        be what the next `auto` resumes from, and would push out the new branch's own.
        """
        self.wait()
        return self._on_main(lambda: self._shelf.set_aside_after(step))

    def save(
        self,
        step: int,
        tensors: Mapping[str, Any],
        scalars: Mapping[str, Any],
        rng: bytes = b"",
        manifest: Mapping[str, Any] | None = None,
    ) -> None:
        """Begins a checkpoint; a failure is an event and a reason for `wait`, never an exception.

        One is in flight at a time: this waits for the one before. On return the tensors may change.

        Args:
            step: optimizer steps behind this state.
            tensors: nested dictionaries of tensors, plain or DTensors; what several ranks hold has
                the same name on them.
            scalars: JSON-able; `tokens_total` and `cursor` are repeated in the manifest.
            rng: this rank's random states.
            manifest: further manifest fields, e.g. `recipe_sha256`, `provenance`.
        """
        self.wait()
        began = time.perf_counter()
        flat = flatten(tensors)
        staging_failure = staged_after = None
        if self.asynchronous:
            try:
                flat = stage(flat)
            except Exception as error:  # out of memory, on this rank perhaps alone: tell the others
                staging_failure = describe(error)
            staged_after = time.perf_counter() - began
        # Through JSON now: the caller's objects may change before the thread writes them.
        frozen = json.loads(json.dumps(dict(scalars)))
        extra = json.loads(json.dumps(dict(manifest or {})))
        save = _Save(step, flat, frozen, rng, extra, began, staged_after, staging_failure)
        if not self.asynchronous:
            self._run(save)
            return
        # A daemon: when a peer has died, nothing may keep this process from ending.
        self._thread = threading.Thread(
            target=self._run, args=(save,), name=f"checkpoint-{step}", daemon=True
        )
        self._thread.start()

    def wait(self, raise_failure: bool = False) -> None:
        """Waits for the save in flight.

        Raises:
            RunError: `raise_failure`, and the newest save failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if raise_failure and self._failure is not None:
            raise RunError(
                Problem(self._failure, fix="make room or fix the folder, then resume with auto")
            )

    def find(self, resume: str = "auto", progress: Progress | None = None) -> Found | None:
        """Resolves `--resume` on rank 0, for all; see `find.find_checkpoint`.

        Each newer checkpoint that was skipped is a `warning` event.
        """
        self.wait()
        found = self._on_main(lambda: find_checkpoint(self.folder, resume, progress))
        for reason in found.reasons[:-1] if found else []:
            self._warn(0, reason, hint="it is kept; remove it when it is of no use")
        return found

    def load(self, found: Found, tensors: Mapping[str, Any]) -> tuple[dict[str, Any], bytes | None]:
        """Fills the given tensors in place and returns the scalars and this rank's random states.

        Random states are None for a rank that the writing mesh did not have.

        Raises:
            UserError: names, shapes or dtypes differ; nothing was loaded.
            RunError: a file could not be read.
        """
        self.wait()
        flat = flatten(tensors)
        require_match(found.path, held_by_all(flat, self._ranks), stored_tensors(found.path))
        read_tensors(found.path, flat, self._ranks.group)
        scalars = json.loads((found.path / STATE_NAME).read_text(encoding="utf-8"))
        own = rng_name(self._ranks.rank)
        rng = (found.path / own).read_bytes() if own in found.manifest["files"] else None
        return scalars, rng or None

    def close(self) -> None:
        """Waits for the save in flight and gives the process group back."""
        self.wait()
        self._ranks.close()

    def _on_main(self, work: Callable[[], T]) -> T:
        """`Ranks.on_main`, with the folder named where the machine fails."""
        try:
            return self._ranks.on_main(work)
        except Failure as failure:
            raise RunError(
                Problem(
                    f"checkpoints folder {self.folder}: {failure}",
                    fix="check its permissions and its disk, then run the same command",
                )
            ) from failure

    def _run(self, save: _Save) -> None:
        """One write from first to last; never raises for what can fail on a machine."""
        opened: list[Path] = []
        try:
            total = self._write(save, opened)
        except Exception as error:
            self._discard(opened)
            path = self.folder / step_name(save.step)
            self._failure = f"checkpoint {path} was not written: {describe(error)}"
            self._emit_checkpoint("failed", save, 0, message=self._failure)
            self._warn(save.step, self._failure, hint=_hint(error))
            return
        except BaseException:
            self._discard(opened)
            raise
        self._failure = None
        self.durable_step = save.step
        self._emit_checkpoint("durable", save, total)
        self._thin(save)

    def _write(self, save: _Save, opened: list[Path]) -> int:
        """Returns the bytes of the published checkpoint."""
        ranks = self._ranks

        def open_folder() -> Path:
            self._at("open")
            return self._shelf.open_temporary(save.step)

        ranks.together(lambda: _raise_if(save.staging_failure))
        if save.staged_after is not None:
            size = logical_bytes(held_by_all(save.tensors, ranks))
            path = self.folder / step_name(save.step)
            self._emit("staged", save.step, path, size, save.staged_after)
        folder = ranks.on_main(open_folder)
        opened.append(folder)

        ranks.together(lambda: self._at("tensors"))
        write_tensors(save.tensors, folder, ranks.group)

        def write_rng() -> None:
            self._at("rng")
            write_atomically(folder / rng_name(ranks.rank), save.rng)

        def write_state() -> list[str]:
            self._at("state")
            write_atomically(folder / STATE_NAME, json.dumps(save.scalars, indent=1) + "\n")
            return list_files(folder)

        ranks.together(write_rng)
        names = ranks.on_main(write_state)

        def describe_own_share() -> dict[str, dict[str, Any]]:
            self._at("checksums")
            return describe_files(folder, names[ranks.rank :: ranks.size])

        shares = ranks.together(describe_own_share)
        files = {name: entry for share in shares for name, entry in share.items()}

        def publish() -> None:
            self._at("manifest")
            manifest = compose(save.step, files, save.scalars, save.manifest)
            write_atomically(folder / MANIFEST_NAME, render(manifest))
            sync_folder(folder)
            self._at("publish")
            self._shelf.publish(folder, save.step)

        ranks.on_main(publish)
        return sum(int(entry["bytes"]) for entry in files.values())

    def _thin(self, save: _Save) -> None:
        """Removes what retention lets go; trouble here costs disk, not the checkpoint."""
        if self._ranks.rank != 0:
            return
        try:
            self._at("thin")
            began = time.perf_counter()
            for path, size in self._shelf.thin(save.step):
                self._emit("removed", save.step, path, size, time.perf_counter() - began)
        except Exception as error:
            self._warn(
                save.step,
                f"old checkpoints were not removed: {describe(error)}",
                hint=f"remove what is no longer needed from {self.folder}",
            )

    def _discard(self, opened: list[Path]) -> None:
        if self._ranks.rank == 0:
            for folder in opened:
                shutil.rmtree(folder, ignore_errors=True)

    def _at(self, stage_name: str) -> None:
        assert stage_name in STAGES, stage_name
        self._on_stage(stage_name)

    def _emit_checkpoint(self, state: str, save: _Save, size: int, **more: str) -> None:
        path = self.folder / step_name(save.step)
        self._emit(state, save.step, path, size, time.perf_counter() - save.began, **more)

    def _emit(
        self, state: str, step: int, path: Path, size: int, seconds: float, **more: str
    ) -> None:
        fields = {"state": state, "step": step, "path": str(path), "bytes": size}
        self._tell("checkpoint", {**fields, "seconds": seconds, **more})

    def _warn(self, step: int, message: str, hint: str) -> None:
        fields = {"step": step, "message": message, "where": "checkpoint", "hint": hint}
        self._tell("warning", fields)

    def _tell(self, kind: str, fields: dict[str, Any]) -> None:
        if self._ranks.rank != 0:
            return
        try:
            self._on_event(kind, fields)
        except Exception:  # a full disk stops the log too; the write itself must go on
            logging.getLogger(__name__).exception("the %s event %s was lost", kind, fields)


def _raise_if(failure: str | None) -> None:
    if failure is not None:
        raise Failure(f"no copy of the state could be made: {failure}")


def _hint(error: BaseException) -> str:
    words = str(error)
    if f"[Errno {errno.ENOSPC}]" in words or f"[Errno {errno.EDQUOT}]" in words:
        return "the disk is full: free some space; training goes on and the next save tries again"
    if f"[Errno {errno.EROFS}]" in words or f"[Errno {errno.EACCES}]" in words:
        return "the folder cannot be written to; training goes on and the next save tries again"
    return "training goes on and the next save tries again"
