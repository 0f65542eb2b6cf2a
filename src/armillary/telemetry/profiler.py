"""Chrome traces, and GPU memory snapshots, of chosen steps."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from armillary.telemetry.config import Telemetry
from armillary.telemetry.events import EventLog
from armillary.telemetry.memory_snapshot import start_memory_history, write_memory_snapshot


class StepProfiler:
    """Profiles steps `profile_from` to `profile_from + profile_steps - 1` into RUN/profile.

    The loop calls `before_step` and `after_step` around each step; on other steps they do nothing.
    The step before the first is traced and thrown away, because starting the tracer is slow.
    """

    def __init__(
        self, telemetry: Telemetry, run_folder: Path, log: EventLog, rank: int = 0
    ) -> None:
        wanted = telemetry.profile_from > 0 and (rank == 0 or telemetry.profile_all_ranks)
        self._first = telemetry.profile_from if wanted else 0
        self._last = self._first + telemetry.profile_steps - 1
        self._done = 0
        self._snapshot = telemetry.memory_snapshot
        self._folder = run_folder / "profile"
        self._log = log
        self._rank = rank
        self._profile: profile | None = None
        self._recording_memory = False

    def before_step(self, step: int) -> None:
        """Starts tracing when `step` is the first wanted, or the one before it."""
        if not self._first or self._profile is not None:
            return
        if step not in (self._first - 1, self._first):
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        with warnings.catch_warnings():  # a run resumed at the first step cannot warm up
            warnings.filterwarnings("ignore", message=".*warmup.*")
            wanted = schedule(
                wait=0, warmup=self._first - step, active=self._last - self._first + 1, repeat=1
            )
        self._profile = profile(
            activities=activities,
            schedule=wanted,
            on_trace_ready=self._export,
            record_shapes=True,
        )
        self._profile.start()
        if self._snapshot:
            self._recording_memory = start_memory_history()

    def after_step(self, step: int) -> None:
        """Ends the step; after the last wanted one the trace is written."""
        if self._profile is None:
            return
        self._done = step
        self._profile.step()
        if step >= self._last:
            self.close()

    def close(self) -> None:
        """Stops; steps traced so far are written even when the run ends early."""
        running, self._profile = self._profile, None
        if running is None:
            return
        running.stop()
        if self._recording_memory:
            write_memory_snapshot(self._path("memory", "pickle"))
            self._recording_memory = False

    def _export(self, finished: profile) -> None:
        if self._done < self._first:
            return
        path = self._path("trace", "json.gz")
        finished.export_chrome_trace(str(path))
        self._log.emit(
            "profile", self._done, path=path, first_step=self._first, last_step=self._done
        )

    def _path(self, what: str, ending: str) -> Path:
        return self._folder / f"{what}-steps-{self._first}-{self._done}-rank{self._rank}.{ending}"
