"""Opens what a run reports through: the log, the console, the sinks."""

from __future__ import annotations

from pathlib import Path

from armillary.foundation.run_folder import EVENTS_FILE
from armillary.telemetry.config import Telemetry
from armillary.telemetry.events import EventLog
from armillary.telemetry.sinks.sink import Sink


def open_event_log(
    telemetry: Telemetry, run_folder: Path, rank: int = 0, console: Sink | None = None
) -> EventLog:
    """The event log of a rank, with the recipe's sinks; ranks other than 0 are silent.

    Args:
        telemetry: The recipe's part.
        run_folder: Exists; gets `events.jsonl` and the sinks' folders.
        rank: This process's rank.
        console: A console opened earlier (`console.open_console`), so that it showed the loading.
    """
    if rank != 0:
        return EventLog.silent(rank)
    sinks: list[Sink] = [] if console is None else [console]
    if telemetry.tensorboard:
        from armillary.telemetry.sinks.tensorboard import TensorBoardSink

        sinks.append(TensorBoardSink(run_folder / "tensorboard", telemetry.log_every))
    if telemetry.wandb:
        from armillary.telemetry.sinks.wandb import WandbSink

        sinks.append(
            WandbSink(
                run_folder, telemetry.wandb_project, telemetry.wandb_mode, telemetry.log_every
            )
        )
    return EventLog(run_folder / EVENTS_FILE, rank, sinks)
