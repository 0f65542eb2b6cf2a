"""Scalars and samples for TensorBoard (optional dependency group `tensorboard`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from armillary.foundation.errors import missing_extra
from armillary.telemetry.sinks.scalars import scalars


class TensorBoardSink:
    """Writes RUN/tensorboard. A resumed run goes on in the same folder.

    Points after the step that a run resumed from are superseded: TensorBoard hides them when the
    next file begins (`purge_step`).
    """

    def __init__(self, folder: Path, every: int = 1) -> None:
        """
        Args:
            folder: Where the event files go; created.
            every: Steps between two `step` points.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing_extra("tensorboard", "telemetry.tensorboard = true") from error
        self._writer_class = SummaryWriter
        self._writer: Any = None
        self._folder = folder
        self._every = every

    def on_event(self, event: Mapping[str, Any]) -> None:
        """See `Sink.on_event`."""
        step, kind = event["step"], event["kind"]
        if kind == "start":
            self._open(event.get("resumed_from"))
        if kind == "step" and step % self._every:
            return
        values = scalars(event)
        if not values and kind != "sample":
            return
        writer = self._writer or self._open(None)
        for name, value in values.items():
            writer.add_scalar(name, value, step, walltime=event["time"])
        if kind == "sample":
            writer.add_text("sample", f"{event['prompt']}{event['text']}", step, event["time"])
        if kind == "validation":
            writer.flush()

    def close(self) -> None:
        """See `Sink.close`."""
        if self._writer is not None:
            self._writer.close()

    def _open(self, resumed_from: int | None) -> Any:
        self.close()
        purge = None if resumed_from is None else resumed_from + 1
        self._writer = self._writer_class(log_dir=str(self._folder), purge_step=purge)
        return self._writer
