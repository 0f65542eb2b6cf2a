"""One checkpoint on its way: what is written, in which order, and how long a failure is fought.

The order, and why a kill at any point harms nothing: tensors, random states and `state.json` go
into a draft, each file durable when it is written and hashed on the way; then the manifest with
these checksums gives the draft its name. Only then is it a checkpoint, and durable.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from armillary.checkpoint.manifest import STATE_NAME, compose, render, rng_name, step_name
from armillary.checkpoint.places.place import Draft, Place, Written
from armillary.checkpoint.ranks import Failure, Ranks, describe
from armillary.checkpoint.staging import Staging
from armillary.checkpoint.tensors import Piece, Planner, logical_bytes, write_tensors
from armillary.foundation.progress import mark

OnStage = Callable[[str], None]

STAGES = ("open", "tensors", "rng", "state", "publish", "thin")
"""What a write goes through, in order; `on_stage` hears of each before it begins."""

_LONGEST_PAUSE = 60.0
_PAUSE_AT_THE_END = 1.0
_GLANCE = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """All that one checkpoint is made of; training may change everything else meanwhile."""

    step: int
    live: Sequence[Piece]
    """The tensors themselves; not to be read once training goes on, where there is a copy."""
    staging: Staging | None
    """The copy in host memory; None: it is written from the tensors themselves."""
    scalars: dict[str, Any]
    rng: bytes
    """This rank's random states."""
    manifest: dict[str, Any]
    """Further fields."""
    began: float
    """Seconds of `time.perf_counter`."""

    @property
    def pieces(self) -> Sequence[Piece]:
        """What is written; waits for the copy.

        Raises:
            Exception: there is none, for lack of memory perhaps.
        """
        return self.live if self.staging is None else self.staging.pieces

    def release(self) -> None:
        """Gives the copy's memory back."""
        if self.staging is not None:
            self.staging.release()


class Writer:
    """Writes checkpoints to a place, all ranks together; in one thread at a time."""

    def __init__(self, place: Place, ranks: Ranks, on_stage: OnStage) -> None:
        self.place = place
        self._ranks, self._on_stage = ranks, on_stage
        self._planner = Planner(place.file_bytes)

    def stage(self, save: Save) -> int:
        """Waits for the copies of all ranks; returns the bytes of the whole state.

        Raises:
            Failure: some rank could not make one.
        """

        def pieces() -> None:
            try:
                _ = save.pieces
            except Exception as error:
                words = f"no copy of the state could be made: {describe(error)}"
                raise Failure(words) from error

        self._ranks.together(pieces)
        plan = self._planner.plan(save.pieces, self._ranks)
        return logical_bytes(plan.tensors)

    def write(self, save: Save) -> int:
        """One attempt, from first to last; returns the bytes of the published checkpoint.

        Raises:
            Failure: some rank could not; nothing of it is left where that is possible.
            RunError: another run has taken the place over.
        """

        def begin() -> Draft:
            self.at("open")
            return self.place.begin(step_name(save.step))

        draft = self._ranks.on_main(begin)
        try:
            return self._fill(save, draft)
        except BaseException:
            if self._ranks.rank == 0:
                with contextlib.suppress(Exception):  # it says nothing new of what went wrong
                    self.place.remove(draft.folder)
            raise

    def _fill(self, save: Save, draft: Draft) -> int:
        ranks = self._ranks
        ranks.together(lambda: self.at("tensors"))
        files = write_tensors(save.pieces, self.place, draft.folder, ranks, self._planner)

        def write_own() -> dict[str, Written]:
            self.at("rng")
            written = {rng_name(ranks.rank): save.rng}
            if ranks.rank == 0:
                self.at("state")
                text = json.dumps(save.scalars, indent=1, allow_nan=False) + "\n"
                written[STATE_NAME] = text.encode()
            return {n: self.place.write(f"{draft.folder}/{n}", [d]) for n, d in written.items()}

        for own in ranks.together(write_own):
            files.update(own)

        def publish() -> None:
            self.at("publish")
            named = {f"{draft.prefix}{name}": file for name, file in files.items()}
            manifest = compose(save.step, named, save.scalars, save.manifest)
            self.place.publish(draft, render(manifest))

        ranks.on_main(publish)
        return sum(file.bytes for file in files.values())

    def at(self, stage: str) -> None:
        """Announces a stage."""
        assert stage in STAGES, stage
        self._on_stage(stage)


class Patience:
    """How long a save that fails is tried again: for ever, until somebody waits for its end."""

    def __init__(self) -> None:
        self._until = math.inf
        self._changed = threading.Event()
        self.superseded = False
        """Whether it is given up for a newer state."""

    def end_after(self, seconds: float, *, superseded: bool = False) -> None:
        """From now on no longer than this."""
        self._until = min(self._until, time.monotonic() + seconds)
        self.superseded = self.superseded or superseded
        self._changed.set()

    def pause(self, failures: int) -> bool:
        """Waits before the next try: 1 s, doubling to 60 s, at most 1 s when somebody waits.

        Returns whether there is to be one.
        """
        began = time.monotonic()
        pause = min(2.0 ** min(failures - 1, 10), _LONGEST_PAUSE)
        while True:
            somebody_waits = self._until < math.inf
            end = began + (min(pause, _PAUSE_AT_THE_END) if somebody_waits else pause)
            left = min(end, self._until) - time.monotonic()
            if left <= 0:
                break
            mark()
            self._changed.wait(min(left, _GLANCE))
            self._changed.clear()
        return time.monotonic() < self._until


def hint_for(words: str, then: str) -> str:
    """What people can do about a save that failed, and what happens by itself."""
    if f"[Errno {errno.ENOSPC}]" in words or f"[Errno {errno.EDQUOT}]" in words:
        return f"the disk is full: free some space; {then}"
    if f"[Errno {errno.EROFS}]" in words or f"[Errno {errno.EACCES}]" in words:
        return f"the folder cannot be written to; {then}"
    return then
