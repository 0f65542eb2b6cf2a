"""From a recipe to a finished run: the order in which everything happens."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

from armillary.checkpoint.find import Found
from armillary.checkpoint.store import CheckpointStore
from armillary.foundation.errors import EXIT_FAILED, EXIT_FINISHED, ArmillaryError, UserError
from armillary.kernels.host_memory import tune_host_allocator
from armillary.parallel import process
from armillary.parallel.mesh import Mesh
from armillary.recipe.problems import problems
from armillary.recipe.recipe import Recipe
from armillary.resilience.claim import RunClaim, check_space, claim_run
from armillary.resilience.signals import Stopped, StopRequest
from armillary.telemetry.console import open_console
from armillary.telemetry.console.choose import RunConsole
from armillary.telemetry.events import EventLog
from armillary.telemetry.open import open_event_log
from armillary.training.agreement import on_main
from armillary.training.assembly import RunData, assemble, open_data
from armillary.training.closing import close_run, closing_lines
from armillary.training.interruptible import Interruptible
from armillary.training.run_folder import CHECKPOINTS, keep_tokenizer, write_recipe
from armillary.training.session import Session

BYTES_PER_PARAMETER = 12
"""Of a checkpoint: a float32 weight and the optimizer's two float32 moments."""


def train(recipe: Recipe, *, name: str, folder: Path, resume: str = "auto") -> int:
    """Trains a recipe in a run folder, from where the folder stands; returns the exit code.

    Called once in every process of the run. What concerns people is shown by rank 0.

    Args:
        name: What the recipe is called, for people.
        folder: The run folder; made if it is not there.
        resume: `auto`, `never`, a step, or the path of a checkpoint or run.

    Raises:
        UserError: the recipe, the folder or the checkpoint do not fit; nothing was started.
        RunError: the run failed.
    """
    if found := problems(recipe, process.world_size()):
        raise UserError(found)
    tune_host_allocator()
    device = process.choose_device(recipe.parallel.device)
    if found := recipe.model.device_problems(device.type):
        raise UserError(found)
    joined = process.init_process_group(device)
    try:
        with StopRequest() as stop, ExitStack() as stack:
            claims: list[RunClaim] = []
            on_main(lambda: claims.append(claim_run(folder)))
            for claim in claims:  # rank 0 holds the folder for all
                stack.enter_context(claim)
            mesh = Mesh.create(recipe.parallel, device)
            run = _Run(recipe, name=name, folder=folder, resume=resume, mesh=mesh, stop=stop)
            return run.run()
    finally:
        if joined:
            process.destroy()


class _Run:
    """A run in a folder that is ours."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        name: str,
        folder: Path,
        resume: str,
        mesh: Mesh,
        stop: StopRequest,
    ) -> None:
        self._recipe, self._name, self._folder, self._resume = recipe, name, folder, resume
        self._mesh, self._stop = mesh, stop
        self._step = 0
        self._began = time.monotonic()

    def run(self) -> int:
        """Everything from reading the data to the last event; returns the exit code."""
        telemetry, rank = self._recipe.telemetry, process.rank()
        console = open_console(telemetry.console, rank=rank, log_every=telemetry.log_every)
        with closing(console):
            try:
                data = open_data(self._recipe, Interruptible(console, self._stop.check))
                on_main(self._require_room)
            except Stopped as stopped:
                return self._say_stopped(stopped)
            with open_event_log(telemetry, self._folder, rank, console) as log:
                try:
                    ending = self._inside(log, console, data)
                except Stopped as stopped:
                    self._end(log, str(stopped), stopped.exit_code)
                    return stopped.exit_code
                except BaseException as error:
                    self._fail(log, error)
                    raise
                self._end(log, "finished", EXIT_FINISHED)
        if self._mesh.is_main:
            print(*ending, sep="\n", file=sys.stderr)
        return EXIT_FINISHED

    def _require_room(self) -> None:
        copies = self._recipe.checkpoint.keep_last + 1  # one is being written
        check_space(
            self._folder, BYTES_PER_PARAMETER * self._recipe.model.parameter_count() * copies
        )

    def _describe(self, data: RunData) -> None:
        """Writes what the folder needs to be understood, once nothing can be refused any more."""
        write_recipe(self._folder, self._recipe)
        keep_tokenizer(self._folder, data.store.tokenizer)

    def _inside(self, log: EventLog, console: RunConsole, data: RunData) -> list[str]:
        """Trains to the end of the budget; returns what to say in closing."""
        checkpoint = self._recipe.checkpoint

        def on_event(kind: str, fields: dict[str, object]) -> None:
            step = fields.pop("step", self._step)
            assert isinstance(step, int)
            log.emit(kind, step, **fields)

        folder = self._folder / CHECKPOINTS
        with CheckpointStore(
            folder, checkpoint.keep_last, checkpoint.asynchronous, on_event
        ) as store:
            store.clean()
            found = store.find(self._resume, console)
            session = Session(
                assemble(self._recipe, self._mesh, data),
                folder=self._folder,
                log=log,
                progress=console,
                store=store,
                stop=self._stop,
                on_step=self._advance,
            )
            self._restore(session, store, found, log)
            on_main(lambda: self._describe(data))
            session.start(name=self._name, resumed_from=found.step if found else None)
            session.run()
            ending = close_run(session, log, console)
        return closing_lines(ending, session, self._folder)

    def _advance(self, step: int) -> None:
        self._step = step

    def _restore(
        self, session: Session, store: CheckpointStore, found: Found | None, log: EventLog
    ) -> None:
        """Goes to the checkpoint, if there is one, and says which and why."""
        if found is not None:
            own = found.path.resolve().parent == store.folder.resolve()
            session.restore(found, is_own=own)
            self._advance(found.step)
            log.emit("message", found.step, message=found.reasons[-1])
        if self._resume == "auto":
            return
        # A deliberate choice of another past: what came after it must not be resumed by mistake.
        for path in store.set_aside_after(found.step if found else -1):
            log.emit("message", self._step, message=f"an older run's checkpoint is now {path}")

    def _end(self, log: EventLog, reason: str, exit_code: int) -> None:
        seconds = time.monotonic() - self._began
        log.emit("stop", self._step, reason=reason, exit_code=exit_code, seconds=seconds)

    def _say_stopped(self, stopped: Stopped) -> int:
        if self._mesh.is_main:
            print(stopped, file=sys.stderr)
        return stopped.exit_code

    def _fail(self, log: EventLog, error: BaseException) -> None:
        """Leaves the reason in the log; the command line shows it to people."""
        if isinstance(error, ArmillaryError):
            message, hint = error.problems[0].message, error.problems[0].fix or ""
            code = error.exit_code
        else:
            message, hint, code = f"{type(error).__name__}: {error}", "", EXIT_FAILED
        log.emit("error", self._step, message=message, where="training", hint=hint)
        self._end(log, "failed", code)
