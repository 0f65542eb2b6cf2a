"""What a store has to say: events for the log, from rank 0 alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from armillary.checkpoint.find import path_of
from armillary.checkpoint.manifest import step_name
from armillary.checkpoint.places.place import Place
from armillary.checkpoint.retention import Shelved
from armillary.checkpoint.writing import Save, hint_for

OnEvent = Callable[[str, dict[str, Any]], None]


class Teller:
    """Turns what happens to checkpoints into events.

    Args:
        place: where they are.
        on_event: takes them; what it raises is logged, as a write must go on.
        speaks: whether this rank is the one that tells.
    """

    def __init__(self, place: Place, on_event: OnEvent, *, speaks: bool) -> None:
        self._place, self._on_event, self._speaks = place, on_event, speaks

    def saved(self, state: str, save: Save, size: int = 0, **more: Any) -> None:
        """A save is `staged`, `durable` or `failed`."""
        seconds = time.perf_counter() - save.began
        self._checkpoint(state, save.step, step_name(save.step), size, seconds, **more)

    def failed(self, save: Save, words: str, *, tries: int, then: str) -> None:
        """A save has failed; a warning tells it the first time."""
        self.saved("failed", save, message=words, tries=tries)
        if tries == 1:
            self.warn(save.step, words, hint=hint_for(words, then))

    def removed(self, each: Shelved, step: int, seconds: float) -> None:
        """An older checkpoint has gone, after the save of `step`."""
        self._checkpoint("removed", step, each.name, each.bytes, seconds)

    def warn(self, step: int, message: str, hint: str) -> None:
        """Training goes on."""
        fields = {"step": step, "message": message, "where": "checkpoint", "hint": hint}
        self._tell("warning", fields)

    def _checkpoint(
        self, state: str, step: int, name: str, size: int, seconds: float, **more: Any
    ) -> None:
        path = path_of(self._place, name)
        fields = {"state": state, "step": step, "path": path, "bytes": size, "seconds": seconds}
        self._tell("checkpoint", fields | more)

    def _tell(self, kind: str, fields: dict[str, Any]) -> None:
        if not self._speaks:
            return
        try:
            self._on_event(kind, fields)
        except Exception:  # a full disk stops the log too; the write itself must go on
            logging.getLogger(__name__).exception("the %s event %s was lost", kind, fields)
