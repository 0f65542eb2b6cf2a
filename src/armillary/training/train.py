"""From a recipe to a finished run: the order in which everything happens."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from armillary.checkpoint.find import Found
from armillary.checkpoint.manifest import step_names
from armillary.checkpoint.places.open import is_remote
from armillary.checkpoint.places.place import Place
from armillary.checkpoint.ranks import Ranks
from armillary.checkpoint.room import copies_needed, require_room
from armillary.checkpoint.store import CheckpointStore
from armillary.foundation.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    ArmillaryError,
    RunError,
    UserError,
)
from armillary.foundation.run_folder import EVENTS_FILE, checkpoints_address
from armillary.foundation.tell import seen_by_every_rank, tell
from armillary.kernels.host_memory import tune_host_allocator
from armillary.parallel import flight_recorder, process
from armillary.parallel.mesh import Mesh
from armillary.recipe.problems import problems
from armillary.recipe.recipe import Recipe
from armillary.resilience.claim import claim_checkpoints, claim_run
from armillary.resilience.roll_call import RollCall
from armillary.resilience.signals import Stopped, StopRequest
from armillary.resilience.watchdog import Recorder, Watch
from armillary.telemetry.console import open_console
from armillary.telemetry.console.choose import RunConsole
from armillary.telemetry.events import EventLog
from armillary.telemetry.open import open_event_log
from armillary.training import resume as resuming
from armillary.training.agreed_stop import AgreedStop
from armillary.training.assembly import Assembly, assemble, open_data
from armillary.training.closing import close_run, closing_lines
from armillary.training.interruptible import Interruptible
from armillary.training.resume import Beginning
from armillary.training.run_folder import describe_run
from armillary.training.session import Session
from armillary.training.upkeep import Upkeep

MEETING_SECONDS = 10.0
"""How long a rank that is asked to stop still waits for others that have not come yet."""
BYTES_PER_PARAMETER = 12
"""Of a checkpoint: a float32 weight and the optimizer's two float32 moments."""


def train(
    recipe: Recipe,
    *,
    name: str,
    folder: Path,
    resume: str = "auto",
    stop: StopRequest | None = None,
    checked: bool = False,
) -> int:
    """Trains a recipe in a run folder, from where the folder stands; returns the exit code.

    Called once in every process of the run. What concerns people is shown by rank 0.

    Args:
        name: What the recipe is called, for people.
        folder: The run folder; made if it is not there.
        resume: `auto`, `never`, a step, or the path of a checkpoint or run.
        stop: Entered earlier, so that signals during the start are heard; else one is entered here.
        checked: Whether `problems` found none with this many ranks, so that files are not looked
            for once more.

    Raises:
        UserError: the recipe, the folder or the checkpoint do not fit; nothing was started, and the
            log of an earlier run in the folder is as it was.
        Stopped: a stop was asked for before anything was started.
        RunError: the run failed.
    """
    with seen_by_every_rank():
        found = problems(recipe, process.world_size(), data=not checked)
        if found:
            raise UserError(found)
    tune_host_allocator()
    with seen_by_every_rank():
        device = process.choose_device(recipe.parallel.device)
        if found := recipe.model.device_problems(device.type, recipe.precision.compute):
            raise UserError(found)
    with ExitStack() as stack:
        stop = stop or stack.enter_context(StopRequest())
        with stop.leaving_after(MEETING_SECONDS):
            roll_call, ranks = _meet(stack, stop, device, recipe.watchdog.group_seconds)
        with roll_call.naming_the_lost():

            def claim() -> None:  # rank 0 holds the folder for all
                stack.enter_context(claim_run(folder))
                if (elsewhere := recipe.checkpoint.folder) and not is_remote(elsewhere):
                    stack.enter_context(claim_checkpoints(Path(elsewhere)))

            agreed = AgreedStop(stop, ranks)
            agreed.check()
            ranks.on_main(claim)
            watch = Watch(
                recipe.watchdog,
                folder=folder,
                roll_call=roll_call,
                recorder=Recorder(
                    counts=flight_recorder.begun,
                    unfinished=flight_recorder.unfinished,
                    dump=flight_recorder.dump,
                ),
            )
            run = _Run(
                recipe,
                name=name,
                folder=folder,
                resume=resume,
                mesh=Mesh.create(recipe.parallel, device),
                stop=agreed,
                roll_call=roll_call,
                watch=watch,
            )
            with watch:
                return run.run()


def _meet(
    stack: ExitStack, stop: StopRequest, device: torch.device, timeout_seconds: float
) -> tuple[RollCall, Ranks]:
    """Joins the other ranks, until the stack is left; from now on each hears of all."""
    if process.init_process_group(device, timeout_seconds):
        stack.callback(process.destroy)
    roll_call = stack.enter_context(
        RollCall(process.store(), rank=process.rank(), world_size=process.world_size())
    )
    stop.share(roll_call)
    with roll_call.naming_the_lost():
        return roll_call, stack.enter_context(closing(Ranks(roll_call.require_all)))


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
        stop: AgreedStop,
        roll_call: RollCall,
        watch: Watch,
    ) -> None:
        self._roll_call, self._watch = roll_call, watch
        watch.tell = self._stands_still
        self._recipe, self._name, self._folder, self._resume = recipe, name, folder, resume
        self._mesh, self._stop, self._ranks = mesh, stop, stop.ranks
        self._session: Session | None = None
        self._log: EventLog | None = None
        self._untold: list[tuple[str, dict[str, Any]]] = []
        self._began = time.monotonic()
        self._nothing_left = ""

    def run(self) -> int:
        """Everything from reading the data to the last event; returns the exit code."""
        telemetry, checkpoint = self._recipe.telemetry, self._recipe.checkpoint
        console = open_console(
            telemetry.console, rank=process.rank(), log_every=telemetry.log_every
        )
        address = checkpoints_address(self._folder, checkpoint.folder)
        store = CheckpointStore(
            address, checkpoint, self._tell, on_wait=self._roll_call.require_all
        )
        with closing(console), store:
            try:
                # Named here already, so that the log names them; each rank sees it by itself.
                with self._roll_call.naming_the_lost(), seen_by_every_rank():
                    assembly, beginning = self._prepare(store, console)
            except (UserError, Stopped):
                raise
            except BaseException as error:
                with self._logging(console):
                    self._fail(error)
                raise
            if self._nothing_left:
                if self._mesh.is_main:
                    print(self._nothing_left, file=sys.stderr)
                return EXIT_FINISHED
            with self._logging(console) as log:
                try:
                    # What the store has to tell comes before the end.
                    with store, self._roll_call.naming_the_lost():
                        session = Session(
                            assembly,
                            beginning,
                            folder=self._folder,
                            log=log,
                            progress=console,
                            store=store,
                            stop=self._stop,
                            upkeep=Upkeep(
                                self._recipe.watchdog,
                                self._watch,
                                self._ranks,
                                log,
                                step=beginning.position.step,
                            ),
                        )
                        ending = self._train(session, log, console)
                except Stopped as stopped:
                    self._end(str(stopped), stopped.exit_code, self._stop.seconds())
                    return stopped.exit_code
                except BaseException as error:
                    self._fail(error)
                    raise
                self._end("finished", EXIT_FINISHED)
        if self._mesh.is_main:
            print(*ending, sep="\n", file=sys.stderr)
        return EXIT_FINISHED

    def _train(self, session: Session, log: EventLog, console: RunConsole) -> list[str]:
        """To the end of the budget; returns what to say in closing."""
        self._session = session
        session.start(name=self._name)
        session.run()
        ending = close_run(session, log, console)
        self._ranks.on_main(lambda: resuming.forget_followed(self._folder))
        return closing_lines(ending, session, self._folder)

    def _prepare(self, store: CheckpointStore, console: RunConsole) -> tuple[Assembly, Beginning]:
        """All that can be refused, and then the folder as it is when training begins."""
        recipe = self._recipe
        progress = Interruptible(console, self._stop.request.check)
        followed = self._ranks.on_main(
            lambda: resuming.followed_before(self._folder, store.place, self._resume, recipe)
        )
        goes_on = self._resume == "auto" or followed is not None
        self._ranks.on_main(lambda: self._require_room(store.place, goes_on=goes_on))
        data = open_data(recipe, progress, self._ranks, self._stop.request.check)
        store.clean()
        found = self._find(store, followed, progress)
        if found is not None:
            resuming.require_budget(found, recipe, store.place)
        self._stop.check()
        with console.task("building the model"):
            assembly = assemble(recipe, self._mesh, data)
        beginning = resuming.begin_anew(assembly)
        if found is not None:
            self._stop.check()
            with console.task(f"loading step {found.step}"):
                beginning = resuming.restore(assembly, store, found, self._stop.request.check)
        for note in beginning.notes:
            fields = {"message": note, "where": "resume", "hint": "see checkpoint.partial"}
            self._tell("warning", {"step": 0} | fields)
        # From here on there is something to save: the first step sees a request to stop.
        self._settle(assembly, store, found)
        return assembly, beginning

    def _require_room(self, place: Place, *, goes_on: bool) -> None:
        there = len(step_names(place)) if goes_on else 0
        copies = copies_needed(self._recipe.checkpoint, there)
        require_room(place, BYTES_PER_PARAMETER * self._recipe.model.parameter_count() * copies)

    def _find(
        self, store: CheckpointStore, followed: int | None, progress: Interruptible
    ) -> Found | None:
        """The checkpoint to begin at; see `resuming.followed_before`."""
        if followed is not None:
            try:
                found = store.find("auto", progress)
            except UserError:  # what was saved since is damaged, so the request is followed again
                found = None
            if found is not None and found.step > followed:
                note = f"--resume {self._resume} was followed before, so the run goes on from there"
                redo = f"remove {self._folder / resuming.RESUMED_FILE} to go back once more"
                self._tell("message", {"step": found.step, "message": f"{note}; {redo}"})
                self._resume = "auto"
                return found
        return store.find(self._resume, progress)

    def _settle(self, assembly: Assembly, store: CheckpointStore, found: Found | None) -> None:
        """Says where the run begins and makes the folder its own; nothing is refused any more."""
        step = found.step if found else 0
        if found is not None:
            if warning := resuming.recipe_warning(found, self._recipe, self._folder):
                hint = "the run goes on with the values of this command"
                fields = {"step": step, "message": warning, "where": "resume", "hint": hint}
                self._tell("warning", fields)
            self._tell("message", {"step": step, "message": found.reasons[-1]})
        tokenizer = assembly.data.store.tokenizer
        if found is not None and resuming.is_end(found, store.place, self._recipe):
            self._say_finished(found)  # the weights are of the recipe that is there, which stays
        else:
            self._ranks.on_main(lambda: describe_run(self._folder, self._recipe, tokenizer))
        if self._resume == "auto":
            return
        # A deliberate choice of another past: what came after it must not be resumed by mistake.
        after = found.step if found and resuming.is_own(found, store.place) else -1
        for path in store.set_aside_after(after):
            message = f"an older run's checkpoint is now {path}"
            self._tell("message", {"step": step, "message": message})
        self._ranks.on_main(
            lambda: resuming.remember_followed(self._folder, self._resume, self._recipe, after)
        )

    def _say_finished(self, found: Found) -> None:
        """There is no step to take; the end itself is told again unless it is in the log."""
        message = f"{self._folder} has finished already at step {found.step:,}"
        hint = "a longer budget, as --budget.steps, goes on from there"
        told = self._ranks.on_main(lambda: resuming.is_told(found, self._folder, self._recipe))
        if told and self._resume == "auto":
            self._nothing_left = f"{message}; {hint}"
        else:
            self._tell("message", {"step": found.step, "message": f"{message}; {hint}"})

    @contextmanager
    def _logging(self, console: RunConsole) -> Iterator[EventLog]:
        """Opens the log, and first tells it what happened before.

        Not sooner: a command that is refused leaves no trace in the log of a finished run.
        """
        telemetry = self._recipe.telemetry
        with open_event_log(telemetry, self._folder, process.rank(), console) as log:
            self._log = log
            for kind, fields in self._untold:
                self._tell(kind, fields)
            yield log

    def _tell(self, kind: str, fields: dict[str, Any]) -> None:
        """Takes an event, also from the thread that writes checkpoints."""
        if self._log is None:
            self._untold.append((kind, fields))
        else:
            self._log.emit(kind, **fields)

    def _end(self, reason: str, exit_code: int, from_signal: float | None = None) -> None:
        fields: dict[str, Any] = {"reason": reason, "exit_code": exit_code}
        fields["step"] = self._session.position.step if self._session else 0
        fields["seconds"] = time.monotonic() - self._began
        if from_signal is not None:
            fields["seconds_from_signal"] = from_signal
        self._tell("stop", fields)

    def _stands_still(self, error: RunError, speaks: bool) -> None:
        """From a thread of the watch, which ends the process then: nothing wakes the main one."""
        tell(str(error), every_rank_sees_it=True)
        if not speaks:
            return
        if self._log is None or self._log.path is None:  # too early, or rank 0 does not answer
            self._log = EventLog(self._folder / EVENTS_FILE, process.rank())
        self._fail(error)
        log, self._log = self._log, EventLog.silent()  # what others make of the end is no news
        log.close()

    def _fail(self, error: BaseException) -> None:
        """Leaves the reason in the log; the command line shows it to people."""
        if isinstance(error, ArmillaryError):
            message, hint = error.problems[0].message, error.problems[0].fix or ""
            code = error.exit_code
        else:
            message, hint, code = f"{type(error).__name__}: {error}", "", EXIT_FAILED
        step = self._session.position.step if self._session else 0
        fields = {"step": step, "message": message, "where": "training", "hint": hint}
        self._tell("error", fields)
        self._end("failed", code, self._stop.request.seconds)
