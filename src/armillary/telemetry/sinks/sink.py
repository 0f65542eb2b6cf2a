"""The one interface of every view of the events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Sink(Protocol):
    """Receives each event after it was logged, exactly as it stands in the log."""

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Takes one event. What it raises is caught, reported once, and ends this sink."""

    def close(self) -> None:
        """Writes out what is buffered and lets go."""
