"""Requests to stop in every phase of a run on two ranks: state saved, and an exit code to tell.

    python tests/reliability/stops.py [--trials 40]

In each trial two ranks run until a named phase is under way, and after a random time in it both of
them, or one alone, get SIGTERM, SIGUSR1 or SIGINT. Phases of a tiny run pass in milliseconds, so
the one in question is made to last (`slow_phase.py`). Afterwards both ranks must have ended with
exit code 75, and the newest checkpoint that verifies must be that of the step that was running, of
the last finished step where none was, or none where there was no model yet. Then the same command
completes the run, and each of its steps must be, to the last bit, that of a run nobody stopped.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from armillary.checkpoint.find import find_checkpoint
from armillary.checkpoint.places.open import open_place
from armillary.foundation.errors import EXIT_RUN_ME_AGAIN
from armillary.foundation.run_folder import CHECKPOINTS_FOLDER
from armillary.recipe.budget import Sampling, Validation
from armillary.recipe.toml import to_toml
from reliability.slow_phase import VARIABLE
from reliability.zygote import Process, Zygote
from tiny_runs import accumulating, events_of, steps_of, tiny_recipe, write_corpus

STEPS = 9
RANKS = 2
SECONDS_LEFT = 120.0
"""In which a phase must begin, and ranks must end."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SLOW_PHASE = Path(__file__).with_name("slow_phase.py")


@dataclass(frozen=True)
class Phase:
    """A phase of a run, and how it is made to last."""

    name: str
    place: str
    """`module:function` that is called in it."""
    call: int = 1
    """The first call of it that belongs to the phase."""
    seconds: float = 0.5
    """By which each call is made longer."""
    ranks: tuple[int, ...] = (0, 1)
    """On which of them."""
    steps: tuple[int, int] | None = (0, STEPS)
    """Least and most step of the checkpoint afterwards; None: there is none."""
    after: int | None = None
    """The step that an earlier command has left a checkpoint of; None: there was none."""
    options: tuple[str, ...] = ()
    """Of the command."""


SYNCHRONOUS = ("--checkpoint.asynchronous", "false")
COMPILED = ("--compile.enabled", "true", "--compile.backend", "aot_eager")
PHASES = (
    Phase("ranks meet", "armillary.parallel.process:init_process_group", ranks=(1,), steps=None),
    Phase("reading the corpus", "armillary.data.build:scan_piece", ranks=(0,), steps=None),
    Phase(
        "learning the vocabulary",
        "armillary.data.build:_Build._saved_tokenizer",
        ranks=(0,),
        seconds=3.0,
        steps=None,
    ),
    Phase("tokenising", "armillary.data.build:encode_piece", ranks=(0,), steps=None),
    Phase("verifying a checkpoint", "armillary.checkpoint.find:verify", steps=(4, 4), after=4),
    Phase("building the model", "armillary.training.prepare:assemble", steps=(0, 0)),
    Phase("loading", "armillary.training.resume:restore_training", steps=(4, 4), after=4),
    Phase(
        "compiling",
        "armillary.parallel.model:ParallelModel.forward_backward",
        seconds=0.1,
        steps=(1, 2),
        options=COMPILED,
    ),
    Phase("a step", "armillary.parallel.model:ParallelModel.forward_backward", 3, steps=(3, 5)),
    Phase(
        "a look at held-out text", "armillary.data.dataset:ValidationDataset.batch", steps=(4, 4)
    ),
    Phase("staging a checkpoint", "armillary.training.session:gather_state", steps=(3, 4)),
    Phase("writing one, asynchronous", "armillary.checkpoint.writing:Writer.write", steps=(3, 6)),
    Phase(
        "writing one, synchronous",
        "armillary.checkpoint.writing:Writer.write",
        steps=(3, 4),
        options=SYNCHRONOUS,
    ),
    Phase("the last checkpoint", "armillary.checkpoint.writing:Writer.write", 3, steps=(9, 9)),
    Phase("scoring all held-out text", "armillary.training.train:close_run", steps=(9, 9)),
    Phase(
        "compressing", "armillary.training.closing:measure_compressors", ranks=(0,), steps=(9, 9)
    ),
    Phase("writing samples", "armillary.inference.generate:choose", steps=(9, 9)),
)


@dataclass(frozen=True)
class Outcome:
    """What one trial has shown."""

    phase: Phase
    signal_name: str
    asked: tuple[int, ...]
    """Ranks that got the signal."""
    exit_codes: tuple[int, ...]
    step: int | None
    """Of the newest checkpoint that verifies; None: there is none."""
    seconds: float
    """From the signal to the end of the last rank."""
    wrong: tuple[str, ...]


class Ground:
    """A folder in which trials are made: a corpus, its tokens, and a run that nobody stopped."""

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        self.zygote, self.folder = zygote, folder
        write_corpus(folder)
        recipe = accumulating(tiny_recipe(folder, steps=STEPS), 2)
        recipe = replace(
            recipe,
            validation=Validation(every=4, sequences=12),
            checkpoint=replace(recipe.checkpoint, every=3),
            sampling=Sampling(prompts=("the ring",), tokens=6),
        )
        (folder / "recipe.toml").write_text(to_toml(recipe))
        assert self.complete(folder / "whole", ()) == [0] * RANKS, self.said(folder / "whole")
        self.steps = steps_of(folder / "whole")

    def start(self, run: Path, options: Sequence[str], slow: str = "") -> list[Process]:
        """The ranks of a command."""
        command = ["train", "--from-file", str(self.folder / "recipe.toml"), "--run", str(run)]
        return self.zygote.start_ranks(
            [*command, *options],
            RANKS,
            {VARIABLE: slow} if slow else {},
            output=f"{run}.out",
            prelude=SLOW_PHASE,
        )

    def complete(self, run: Path, options: Sequence[str]) -> list[int]:
        """Runs a command to its end; the exit codes."""
        return wait_for(self.start(run, options))

    def said(self, run: Path) -> str:
        """The end of what the ranks have printed."""
        texts = (Path(f"{run}.out.{rank}").read_text()[-2000:] for rank in range(RANKS))
        return "\n".join(texts)


def wait_for(ranks: Sequence[Process]) -> list[int]:
    """The exit codes; ranks that do not end are killed."""
    try:
        return [rank.wait(SECONDS_LEFT) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def trial(
    ground: Ground, number: int, phase: Phase, *, asked: Sequence[int], by: signal.Signals
) -> Outcome:
    """Asks ranks to stop in a phase, looks at what is left, and completes the run."""
    run = ground.folder / f"run-{number}"
    options = list(phase.options)
    if phase.steps is None:  # a corpus still to be read
        options += ["--data.cache", str(ground.folder / f"cache-{number}")]
    if phase.after is not None:
        begun = stopped_after(ground, run, phase.after)
        assert begun == [EXIT_RUN_ME_AGAIN] * RANKS, ground.said(run)
    mark = ground.folder / f"mark-{number}"
    slow = {"place": phase.place, "call": phase.call, "seconds": phase.seconds}
    known = json.dumps({**slow, "mark": str(mark), "ranks": phase.ranks})
    ranks = ground.start(run, options, known)
    wait_for_mark(ground, run, mark, ranks)
    time.sleep(random.Random(number).random() * phase.seconds)
    sent = time.monotonic()
    for rank in asked:
        ranks[rank].send(by)
    codes = wait_for(ranks)
    seconds = time.monotonic() - sent
    found = find_checkpoint(open_place(run / CHECKPOINTS_FOLDER), "auto")
    step = None if found is None else found.step
    wrong = what_is_wrong(phase, run, codes, step)
    if (ends := ground.complete(run, options)) != [0] * RANKS:
        wrong.append(f"could not be completed: {ends}")
    elif phase.options != COMPILED and steps_of(run) != ground.steps:
        wrong.append("the completed run is not the one that nobody stopped")
    if wrong:
        wrong.append(ground.said(run))
    return Outcome(phase, by.name, tuple(asked), tuple(codes), step, seconds, tuple(wrong))


def stopped_after(ground: Ground, run: Path, step: int) -> list[int]:
    """Leaves the checkpoint of a step, by a request to stop in the step."""
    mark = ground.folder / f"{run.name}-begun"
    place = "armillary.parallel.model:ParallelModel.forward_backward"
    slow = {"place": place, "call": step, "seconds": 1.0, "mark": str(mark), "ranks": [0, 1]}
    ranks = ground.start(run, (), json.dumps(slow))
    wait_for_mark(ground, run, mark, ranks)
    ranks[0].send(signal.SIGTERM)
    return wait_for(ranks)


def wait_for_mark(ground: Ground, run: Path, mark: Path, ranks: Sequence[Process]) -> None:
    """Until the phase has begun on some rank."""
    deadline = time.monotonic() + SECONDS_LEFT
    while not any(Path(f"{mark}-{rank}").exists() for rank in range(RANKS)):
        assert time.monotonic() < deadline, f"the phase did not begin: {ground.said(run)}"
        assert all(rank.poll() is None for rank in ranks), f"ended before: {ground.said(run)}"
        time.sleep(0.01)


def what_is_wrong(phase: Phase, run: Path, codes: Sequence[int], step: int | None) -> list[str]:
    """What a stop has not left as it should."""
    wrong = [] if list(codes) == [EXIT_RUN_ME_AGAIN] * RANKS else [f"exit codes {codes}"]
    if phase.steps is None:
        return wrong + ([] if step is None else [f"a checkpoint of step {step}"])
    low, high = phase.steps
    if step is None or not low <= step <= high:
        wrong.append(f"the newest checkpoint that verifies is of step {step}")
    finished = max((event["step"] for event in events_of(run, "step")), default=0)
    if step != finished:
        wrong.append(f"step {finished} was finished, and step {step} is saved")
    stop = events_of(run)[-1]
    if (stop["kind"], stop["step"], stop["exit_code"]) != ("stop", step, EXIT_RUN_ME_AGAIN):
        wrong.append(f"the log ends with {stop}")
    elif phase.after is None and "seconds_from_signal" not in stop:
        wrong.append("the log does not say how long it took")
    return wrong


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """The outcomes by phase, as Markdown."""
    lines = [
        "| phase | trials | one rank asked | saved step | as promised | seconds, median | worst |",
        "|---|---|---|---|---|---|---|",
    ]
    for phase in PHASES:
        own = [outcome for outcome in outcomes if outcome.phase is phase]
        if not own:
            continue
        alone = sum(len(outcome.asked) < RANKS for outcome in own)
        steps = sorted({-1 if outcome.step is None else outcome.step for outcome in own})
        saved = ", ".join("none yet" if step < 0 else str(step) for step in steps)
        right = sum(not outcome.wrong for outcome in own)
        seconds = [outcome.seconds for outcome in own]
        lines.append(
            f"| {phase.name} | {len(own)} | {alone} | {saved} | {right} of {len(own)} |"
            f" {statistics.median(seconds):.1f} | {max(seconds):.1f} |"
        )
    seconds = [outcome.seconds for outcome in outcomes]
    right = sum(not outcome.wrong for outcome in outcomes)
    lines.append(
        f"| all | {len(outcomes)} | {sum(len(o.asked) < RANKS for o in outcomes)} | |"
        f" {right} of {len(outcomes)} | {statistics.median(seconds):.1f} | {max(seconds):.1f} |"
    )
    return lines


def main() -> int:
    """All trials; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--phase", help="of this name only")
    arguments = parser.parse_args()
    phases = [phase for phase in PHASES if arguments.phase in (None, phase.name)]
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="stops-") as folder, Zygote() as zygote:
        ground = Ground(zygote, Path(folder))
        for number in range(arguments.trials):
            turn, place = divmod(number, len(phases))
            draw = random.Random(number)
            one_alone = (turn + place) % 2  # each phase has both kinds, by turns
            asked = [draw.randrange(RANKS)] if one_alone else list(range(RANKS))
            phase, by = phases[place], SIGNALS[0] if turn == 0 else draw.choice(SIGNALS)
            outcome = trial(ground, number, phase, asked=asked, by=by)
            outcomes.append(outcome)
            for reason in outcome.wrong:
                words = f"{phase.name}, {outcome.signal_name} to ranks {outcome.asked}: {reason}"
                print(f"trial {number}, {words}", file=sys.stderr)
    print(*table(outcomes), sep="\n")
    return int(any(outcome.wrong for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
