"""From a recipe to a finished run: the order in which everything happens."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import torch

from armillary.checkpoint.places.open import is_remote
from armillary.checkpoint.ranks import Ranks
from armillary.checkpoint.store import CheckpointStore
from armillary.foundation.errors import EXIT_FINISHED, Problem, UserError
from armillary.foundation.run_folder import CHECKPOINTS_FOLDER, checkpoints_address
from armillary.foundation.tell import seen_by_every_rank
from armillary.kernels.host_memory import tune_host_allocator
from armillary.parallel import flight_recorder, process
from armillary.parallel.mesh import Mesh
from armillary.recipe.problems import problems
from armillary.recipe.recipe import Recipe
from armillary.recipe.stages import spans_of
from armillary.resilience.claim import claim_checkpoints, claim_run
from armillary.resilience.roll_call import RollCall
from armillary.resilience.signals import Stopped, StopRequest
from armillary.resilience.watchdog import Recorder, Watch
from armillary.telemetry.console import open_console
from armillary.telemetry.console.choose import RunConsole
from armillary.telemetry.events import EventLog
from armillary.training import resume as resuming
from armillary.training.agreed_stop import AgreedStop
from armillary.training.closing import close_run, closing_lines
from armillary.training.prepare import Preparation, Prepared
from armillary.training.session import Session
from armillary.training.telling import Telling
from armillary.training.upkeep import Upkeep

MEETING_SECONDS = 10.0
"""How long a rank that is asked to stop still waits for others that have not come yet."""


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
        spans = spans_of(recipe)
        for own in (span.recipe for span in spans):
            if found := own.model.device_problems(device.type, own.precision.compute):
                raise UserError(found)
    with ExitStack() as stack:
        stop = stop or stack.enter_context(StopRequest())
        with stop.leaving_after(MEETING_SECONDS):
            roll_call, ranks = _meet(stack, stop, device, recipe.watchdog.group_seconds)
        with roll_call.naming_the_lost():
            agreed = AgreedStop(stop, ranks)
            agreed.check()
            ranks.on_main(lambda: _claim(stack, recipe, folder))  # rank 0 holds it for all
            with _watch(recipe, folder, roll_call) as watch:
                run = _Run(
                    recipe,
                    name=name,
                    folder=folder,
                    resume=resume,
                    mesh=Mesh.create(spans[0].recipe.parallel, device),
                    stop=agreed,
                    roll_call=roll_call,
                    watch=watch,
                )
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


def _claim(stack: ExitStack, recipe: Recipe, folder: Path) -> None:
    """Takes the folders of the run, until the stack is left."""
    elsewhere = recipe.checkpoint.folder
    is_local = elsewhere and not is_remote(elsewhere)
    if is_local and os.path.realpath(elsewhere) == os.path.realpath(folder):
        raise UserError(
            Problem(
                f"checkpoint.folder = {elsewhere} is the run folder itself",
                "another folder; empty for RUN/checkpoints",
                f"--checkpoint.folder {Path(elsewhere, CHECKPOINTS_FOLDER)}, or leave it out",
            )
        )
    stack.enter_context(claim_run(folder))
    if is_local:
        stack.enter_context(claim_checkpoints(Path(elsewhere)))


def _watch(recipe: Recipe, folder: Path, roll_call: RollCall) -> Watch:
    recorder = Recorder(
        counts=flight_recorder.begun,
        unfinished=flight_recorder.unfinished,
        dump=flight_recorder.dump,
    )
    return Watch(recipe.watchdog, folder=folder, roll_call=roll_call, recorder=recorder)


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
        self._recipe, self._name, self._folder, self._resume = recipe, name, folder, resume
        self._mesh, self._stop = mesh, stop
        self._roll_call, self._watch = roll_call, watch
        self._prepared: Prepared | None = None  # what is held nowhere else can be let go of
        self._telling = Telling(recipe, folder, lambda: stop.request.seconds)
        watch.tell = self._telling.stands_still

    def run(self) -> int:
        """Everything from reading the data to the last event; returns the exit code."""
        with closing(self._open_console()) as console, self._open_store() as store:
            preparation = self._preparation(store, console)
            if nothing_left := self._prepare(preparation, console):
                self._say(nothing_left)
                return EXIT_FINISHED
            with self._telling.logging(console) as log:
                try:
                    # What the store has to tell comes before the end; who is lost is found out
                    # before that, or it would wait for them.
                    with store, self._roll_call.naming_the_lost():
                        ending = self._train(preparation, store, log, console)
                except Stopped as stopped:
                    with self._roll_call.naming_the_lost():
                        self._telling.stopped(stopped, self._stop.seconds())
                    return stopped.exit_code
                self._telling.finished()
        self._say(*ending)
        return EXIT_FINISHED

    def _open_console(self) -> RunConsole:
        telemetry = self._recipe.telemetry
        return open_console(telemetry.console, rank=process.rank(), log_every=telemetry.log_every)

    def _open_store(self) -> CheckpointStore:
        checkpoint = self._recipe.checkpoint
        return CheckpointStore(
            checkpoints_address(self._folder, checkpoint.folder),
            checkpoint,
            self._telling.event,
            on_wait=self._roll_call.require_all,
        )

    def _preparation(self, store: CheckpointStore, console: RunConsole) -> Preparation:
        return Preparation(
            self._recipe,
            folder=self._folder,
            resume=self._resume,
            mesh=self._mesh,
            stop=self._stop,
            store=store,
            progress=console,
            event=self._telling.event,
        )

    def _prepare(self, preparation: Preparation, console: RunConsole) -> str:
        """See `Preparation`; what is neither refused nor asked for is told in the log.

        Returns why there is nothing to do; empty if there is.
        """
        try:
            # Named here already, so that the log names them; each rank sees it by itself.
            with self._roll_call.naming_the_lost(), seen_by_every_rank():
                self._prepared = preparation.prepare()
                return self._prepared.nothing_left
        except (UserError, Stopped):
            raise
        except BaseException:
            with self._telling.logging(console):
                raise

    def _train(
        self, preparation: Preparation, store: CheckpointStore, log: EventLog, console: RunConsole
    ) -> list[str]:
        """Stage after stage, to the end of the budget; returns what to say in closing."""
        upkeep = Upkeep(self._recipe.watchdog, self._watch, self._stop.ranks, log)
        session = self._session(upkeep, store, log, console)
        session.start(name=self._name)
        session.run()
        while not session.assembly.span.is_last:
            step = session.position.step
            self._telling.stands_at(step)
            del session  # before the next model is built: two of them need not fit
            with seen_by_every_rank():
                self._prepared = preparation.cross(step)
            session = self._session(upkeep, store, log, console)
            session.tell_stage()
            session.run()
        ending = close_run(session, log, console)
        self._stop.ranks.on_main(lambda: resuming.forget_followed(self._folder))
        return closing_lines(ending, session, self._folder)

    def _session(
        self, upkeep: Upkeep, store: CheckpointStore, log: EventLog, console: RunConsole
    ) -> Session:
        """With what was prepared for it."""
        prepared, self._prepared = self._prepared, None
        assert prepared is not None, "prepared once for each session"
        session = Session(
            prepared.assembly,
            prepared.beginning,
            folder=self._folder,
            log=log,
            progress=console,
            store=store,
            stop=self._stop,
            upkeep=upkeep,
        )
        self._watch.step = session.position.step
        self._telling.step = lambda: session.position.step
        return session

    def _say(self, *lines: str) -> None:
        """To people."""
        if self._mesh.is_main:
            print(*lines, sep="\n", file=sys.stderr)
