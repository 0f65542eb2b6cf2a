"""The checkpoints of one run: saved in the background, published whole, found by proof."""

from __future__ import annotations

import functools
import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from torch.optim import Optimizer

from armillary.checkpoint.config import Checkpoint
from armillary.checkpoint.find import Found, find_checkpoint, path_of
from armillary.checkpoint.load import load_rest, load_tensors, stored_for_all
from armillary.checkpoint.manifest import step_name, step_names
from armillary.checkpoint.partial import restore_what_fits
from armillary.checkpoint.places.open import open_place
from armillary.checkpoint.ranks import Failure, Ranks, describe
from armillary.checkpoint.retention import Shelf
from armillary.checkpoint.staging import Stager, Staging
from armillary.checkpoint.state import Model
from armillary.checkpoint.telling import OnEvent, Teller
from armillary.checkpoint.tensors import (
    Differences,
    Stored,
    flatten,
    pieces_in,
)
from armillary.checkpoint.writing import OnStage, Patience, Save, Writer
from armillary.foundation.errors import Problem, RunError
from armillary.foundation.progress import Progress, watched

T = TypeVar("T")

STOP_GRACE_SECONDS = 30.0
"""How long a save that fails is still insisted on once somebody has asked the run to stop."""

_REQUEST_SECONDS = 30.0
"""How long one request to an object store is tried again before the whole save is."""

_GLANCE_SECONDS = 0.2
_YIELD_SECONDS = 1e-3


class CheckpointStore:
    """The checkpoints of a run. Every rank makes one and calls it alike.

    Args:
        address: the folder of the checkpoints: a path, made on the first save, or s3://... .
        config: when to save and what to keep; see `Checkpoint`.
        on_event: called on rank 0 with `checkpoint` or `warning` and the fields of
            docs/contracts.md, `step` among them; from the writing thread when asynchronous.
        on_stage: told each of `STAGES` on each rank; for tests, which make it fail.
        on_wait: called once a second while a rank waits for others; see `Ranks`.
    """

    def __init__(
        self,
        address: Path | str,
        config: Checkpoint | None = None,
        on_event: OnEvent | None = None,
        *,
        on_stage: OnStage | None = None,
        on_wait: Callable[[], object] = lambda: None,
    ) -> None:
        self.config = config or Checkpoint()
        self.place = open_place(address, min(_REQUEST_SECONDS, self.config.retry_seconds))
        self.durable_step: int | None = None
        """The step of the newest save that was published whole; None before the first. The same on
        all ranks after `wait`."""
        self._shelf = Shelf(self.place, self.config)
        self._ranks = Ranks(on_wait)  # of its own: saves agree in a thread
        self._teller = Teller(
            self.place, on_event or (lambda kind, fields: None), speaks=self._ranks.rank == 0
        )
        self._writer = Writer(self.place, self._ranks, on_stage or (lambda stage: None))
        self._stager = Stager()
        self._staging: Staging | None = None
        self._thread: threading.Thread | None = None
        self._patience = Patience()
        self._newest_step: int | None = None
        """Of the newest save, durable or on its way; the same on all ranks."""
        self._copied = threading.Event()
        """Set when all ranks know whether all have their copies for the newest save."""
        self._copy_failed = False
        self._held: Save | None = None
        """The newest save, if made without a copy, until it is durable or its tensors change."""
        self._failure: str | None = None
        self._failures = 0
        """How many saves in a row have failed."""
        self._retry_at: int | None = None

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
        self._on_main(self.place.clean)

    def set_aside_after(self, step: int) -> list[str]:
        """Renames checkpoints newer than `step` to `set-aside-...`; returns where they are now.

        For a run that deliberately resumes from an older one: left in place, the newer ones would
        be what the next `auto` resumes from, and would push out the new branch's own.
        """
        self.wait()
        aside, newest = self._on_main(
            lambda: (self._shelf.set_aside_after(step), max(step_names(self.place), default=None))
        )
        if self.durable_step is not None and self.durable_step > step:
            self.durable_step, self._newest_step = newest, None
        return aside

    def save(
        self,
        step: int,
        tensors: Mapping[str, Any],
        scalars: Mapping[str, Any],
        rng: bytes = b"",
        manifest: Mapping[str, Any] | None = None,
        *,
        final: bool = False,
        permanent: bool = False,
    ) -> None:
        """Begins a checkpoint; a failure is an event and a reason for `wait`, never an exception.

        One is in flight at a time: this waits for the one before, and gives it up if it has failed;
        one of the same step is left to go on. Asynchronous, it returns at once: the tensors may be
        read, and changed after `wait_until_staged`.

        Args:
            step: optimizer steps behind this state.
            tensors: nested dictionaries of tensors, plain or DTensors; what several ranks hold has
                the same name on them.
            scalars: JSON-able; `tokens_total` and `cursor` are repeated in the manifest.
            rng: this rank's random states.
            manifest: further manifest fields, e.g. `recipe_sha256`, `provenance`, `scores`.
            final: the run ends with this state.
            permanent: it stays for good, whatever `config` says.
        """
        if step == self._newest_step and self._has_copy():
            return
        self._settle()
        began = time.perf_counter()
        # Through JSON now: the caller's objects may change before the thread writes them.
        asked = "final" if final else "permanent" if permanent else None
        kind = asked or self.config.kind_of(step)
        extra = json.loads(json.dumps({**(manifest or {}), "kind": kind}))
        live = pieces_in(tensors)
        self._staging = self._stager.stage(live) if self.config.asynchronous else None
        save = Save(
            step=step,
            live=() if self._staging else tuple(live),
            staging=self._staging,
            scalars=json.loads(json.dumps(dict(scalars), allow_nan=False)),
            rng=rng,
            manifest=extra,
            began=began,
        )
        self._begin(save)

    def wait_until_staged(self) -> None:
        """To be called before tensors that were given to `save` are changed."""
        self._held = None
        if self._staging is not None:
            self._staging.wait()
            self._staging = None

    def retry_due(self, step: int) -> bool:
        """Whether a save that was not asynchronous has failed, and it is time to try another.

        1, 2, 4, 8 ... steps after the first, second, third ... failure in a row.
        """
        return self._retry_at is not None and step >= self._retry_at

    def wait(
        self,
        raise_failure: bool = False,
        *,
        retry_seconds: float | None = None,
        stop_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        """Waits for the save in flight; one that fails is given up, unless `raise_failure`.

        Args:
            raise_failure: insist on a save that fails, and raise if it does all the same.
            retry_seconds: how long to insist; None: as the recipe says.
            stop_asked: once true, no longer than `STOP_GRACE_SECONDS` more.

        Raises:
            RunError: `raise_failure`, and the newest save failed.
        """
        if not raise_failure:
            self._settle()
            return
        seconds = self.config.retry_seconds if retry_seconds is None else retry_seconds
        if self._thread is None and self._held is not None and self._failure is not None:
            save, self._patience = self._held, Patience()
            self._thread = threading.Thread(
                target=self._run, args=(save,), name=f"checkpoint-{save.step}", daemon=True
            )
            self._thread.start()
        self._patience.end_after(seconds)
        self._join(stop_asked)
        if self._failure is not None:
            newest = "none" if self.durable_step is None else f"step {self.durable_step}"
            message = f"{self._failure} (newest durable: {newest})"
            fix = "make room or fix the folder, then resume with auto"
            raise RunError(Problem(message, fix=fix))

    def find(self, resume: str = "auto", progress: Progress | None = None) -> Found | None:
        """Resolves `--resume` on rank 0, for all; see `find.find_checkpoint`.

        Each newer checkpoint that was skipped is a `warning` event.
        """
        self.wait()
        found = self._on_main(lambda: find_checkpoint(self.place, resume, progress))
        for reason in found.reasons[:-1] if found else []:
            self._teller.warn(0, reason, hint="it is kept; remove it when it is of no use")
        return found

    def load(
        self,
        found: Found,
        tensors: Mapping[str, Any],
        check: Callable[[], None] = lambda: None,
    ) -> tuple[dict[str, Any], bytes | None]:
        """Fills the given tensors in place and returns the scalars and this rank's random states.

        Random states are None for a rank that the writing mesh did not have. `check` is called
        between reads and may raise to end them, on all ranks; tensors are then half filled.

        Raises:
            UserError: names, shapes or dtypes differ; nothing was loaded.
            RunError: a file could not be read.
        """
        self.wait()
        load_tensors(found, flatten(tensors), self._ranks, check=check)
        return load_rest(found, self._ranks)

    def tensors_in(self, found: Found) -> dict[str, Stored]:
        """See `load.stored_for_all`."""
        return stored_for_all(found, self._ranks)

    def restore_what_fits(
        self, found: Found, model: Model, optimizers: Sequence[Optimizer]
    ) -> Differences:
        """See `partial.restore_what_fits`."""
        self.wait()
        return restore_what_fits(found, model, optimizers, self._ranks)

    def close(self) -> None:
        """Waits for the save in flight and gives the process group back."""
        self.wait()
        self._ranks.close()

    def _begin(self, save: Save) -> None:
        """Writes here and now, or begins to in a thread where there is a copy."""
        self._patience = Patience()
        self._copied, self._newest_step = threading.Event(), save.step
        if save.staging is None:
            self._held = save
            self._patience.end_after(0)
            self._run(save)
            self._newest_step = self.durable_step
            return
        # A daemon: when a peer has died, nothing may keep this process from ending.
        self._thread = threading.Thread(
            target=self._run_beside, args=(save,), name=f"checkpoint-{save.step}", daemon=True
        )
        self._thread.start()

    def _run_beside(self, save: Save) -> None:
        """`_run`, once training has had the interpreter long enough to launch its next work."""
        time.sleep(_YIELD_SECONDS)
        self._run(save)

    def _settle(self) -> None:
        """Brings the save in flight to its end: one that fails is not tried again."""
        self._patience.end_after(0, superseded=True)
        self.place.hurried = True
        try:
            self._join()
        finally:
            self.place.hurried = False
        self._held, self._newest_step = None, self.durable_step

    def _has_copy(self) -> bool:
        """Whether the newest save is durable or goes on by itself; every rank answers alike."""
        self._copied.wait()
        return not self._copy_failed

    def _join(self, stop_asked: Callable[[], bool] = lambda: False) -> None:
        while self._thread is not None:
            self._thread.join(_GLANCE_SECONDS)
            if not self._thread.is_alive():
                self._thread = None
            elif stop_asked():
                self._patience.end_after(STOP_GRACE_SECONDS)

    def _on_main(self, work: Callable[[], T]) -> T:
        """`Ranks.on_main`, with the folder named where the machine fails."""
        try:
            return self._ranks.on_main(work)
        except Failure as failure:
            raise RunError(
                Problem(
                    f"checkpoints folder {self.place.address}: {failure}",
                    fix="check its permissions and its disk, then run the same command",
                )
            ) from failure

    def _run(self, save: Save) -> None:
        """One checkpoint, as often as it takes; never raises for what can fail on a machine."""
        self._copy_failed = True
        try:
            with watched(f"saving step {save.step}"):
                size = self._writer.stage(save)
                self._copy_failed = False
                self._copied.set()
                if save.staging is not None:
                    self._teller.saved("staged", save, size)
                self._insist(save)
        except Exception as error:  # no copy, another run, or a rank was lost: no use to try again
            self._note_failure(save, error, tries=1, then="training goes on without it")
        finally:
            self._copied.set()
            save.release()

    def _insist(self, save: Save) -> None:
        """Tries until it is done or given up; rank 0 decides, the others hear of it."""
        then = "training goes on, and it is tried again"
        if save.staging is None:
            then += " after the next steps"
        for tries in itertools.count(1):
            try:
                size = self._writer.write(save)
            except Failure as failure:
                self._note_failure(save, failure, tries=tries, then=then)
            else:
                self._note_success(save, size)
                return
            if not self._ranks.on_main(functools.partial(self._patience.pause, tries)):
                break
        if self._patience.superseded and save.staging is not None:
            words = f"{self._failure}; no longer tried, as the state has moved on"
            self._teller.saved("failed", save, message=words, tries=tries, superseded=True)

    def _note_failure(self, save: Save, error: Exception, *, tries: int, then: str) -> None:
        path = path_of(self.place, step_name(save.step))
        self._failure = f"checkpoint {path} was not written: {describe(error)}"
        if save.staging is None and tries == 1:
            self._failures += 1
            self._retry_at = save.step + 2 ** (self._failures - 1)
        self._teller.failed(save, self._failure, tries=tries, then=then)

    def _note_success(self, save: Save, size: int) -> None:
        self._failure = self._retry_at = self._held = None
        self._failures = 0
        self.durable_step = save.step
        self._teller.saved("durable", save, size)
        if self._ranks.rank == 0:
            self._thin(save)

    def _thin(self, save: Save) -> None:
        """Removes what retention lets go; trouble here costs disk, not the checkpoint."""
        try:
            self._writer.at("thin")
            began = time.perf_counter()
            self._shelf.trust(step_name(save.step))
            for each in self._shelf.thin(save.step):
                self._teller.removed(each, save.step, time.perf_counter() - began)
        except Exception as error:
            self._teller.warn(
                save.step,
                f"old checkpoints were not removed: {describe(error)}",
                hint=f"remove what is no longer needed from {self.place.address}",
            )
