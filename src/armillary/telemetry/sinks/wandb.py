"""Scalars for Weights & Biases (optional dependency group `wandb`)."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from armillary.foundation.errors import missing_extra
from armillary.foundation.files import write_atomically
from armillary.telemetry.sinks.scalars import scalars

_RUN_ID_FILE = "wandb-run-id"


class WandbSink:
    """One W&B run per run folder: its id is kept there, and a resumed run goes on under it.

    Every point carries its own `step` as the x axis, so that steps repeated after a resume land
    where they belong; W&B drops points whose internal step goes back.
    """

    def __init__(
        self, run_folder: Path, project: str, mode: str = "online", every: int = 1
    ) -> None:
        """
        Args:
            run_folder: Holds the run's id, and the files of offline mode.
            project: W&B project.
            mode: online, offline or disabled.
            every: Steps between two `step` points.
        """
        try:
            import wandb
        except ImportError as error:
            raise missing_extra("wandb", "telemetry.wandb = true") from error
        self._wandb: Any = wandb
        self._folder = run_folder
        self._project = project
        self._mode = mode
        self._every = every
        self._run: Any = None

    def on_event(self, event: Mapping[str, Any]) -> None:
        """See `Sink.on_event`."""
        if event["kind"] == "start" and self._run is None:
            self._open(event)
        if self._run is None or (event["kind"] == "step" and event["step"] % self._every):
            return
        values = scalars(event)
        if values:
            self._run.log(values | {"step": event["step"]})
        elif event["kind"] == "stop":
            self._run.finish(exit_code=event["exit_code"])
            self._run = None

    def close(self) -> None:
        """See `Sink.close`."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _open(self, start: Mapping[str, Any]) -> None:
        file = self._folder / _RUN_ID_FILE
        if not file.exists():
            write_atomically(file, uuid.uuid4().hex[:12])
        self._run = self._wandb.init(
            project=self._project,
            id=file.read_text().strip(),
            name=self._folder.name,
            dir=str(self._folder),
            mode=self._mode,
            resume="allow",
            config={k: v for k, v in start.items() if k not in ("time", "kind", "rank", "step")},
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
