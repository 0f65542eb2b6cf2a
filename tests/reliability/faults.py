"""Disks and stores that fail in the middle of a run: training goes on, and then it is saved.

    python tests/reliability/faults.py

A run of two ranks saves every 5 steps onto something that is made to fail: a small tmpfs that is
filled, one that is remounted read-only, one that another is mounted over, and an S3 server (moto)
that answers with errors or not at all. After 30 s the fault goes away. Shown of each: that steps
went on, that no older checkpoint was touched, that a save made it once the fault was gone, and that
the log has every step. Mounting takes root; without it those trials are left out, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from armillary.checkpoint.find import find_checkpoint
from armillary.checkpoint.places.open import open_place
from armillary.recipe.toml import to_toml
from object_store import ObjectStore, Trouble, fail_with, hang_up, no_trouble
from reliability.zygote import Process, Zygote
from tiny_runs import events_of, tiny_recipe, write_corpus

FAULT_SECONDS = 30.0
SAVE_EVERY = 5
DISK_BYTES = 24 << 20
_STEP = re.compile(r"^step (\d+)", re.MULTILINE)
_CHECKPOINT = re.compile(r"^checkpoint of step (\d+) (durable|failed)", re.MULTILINE)

Break = Callable[[], None]


@dataclass(frozen=True)
class Ground:
    """Where a trial's run and its checkpoints lie, and how to break and mend that."""

    run: Path
    checkpoints: str
    """"" for a folder of the run."""
    break_it: Break
    mend: Break
    env: dict[str, str] = field(default_factory=dict)
    visible: bool = True
    """Whether checkpoints can be looked at during the fault."""


@dataclass
class Outcome:
    """What one trial has shown."""

    name: str
    steps_in_fault: int = 0
    failures_told: int = 0
    kept: int = 0
    """Checkpoints from before the fault that were whole in its middle."""
    seconds_to_save: float = 0.0
    """From the end of the fault to the next durable checkpoint."""
    wrong: list[str] = field(default_factory=list)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A tmpfs of its own."""
    folder.mkdir()
    _root("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        for _ in range(2):  # one may be mounted over it
            subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


def fill(disk: Path) -> None:
    """Leaves no byte free."""
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[Ground]:
    """The whole run folder, log included, on a disk that fills up."""
    with small_disk(folder / "disk") as disk:
        filler = disk / "filler"
        yield Ground(disk / "run", "", lambda: fill(disk), filler.unlink)


@contextlib.contextmanager
def read_only_remount(folder: Path) -> Iterator[Ground]:
    """Checkpoints on a disk that becomes read-only."""
    with small_disk(folder / "disk") as disk:

        def read_only() -> None:
            # A plain remount is refused while a file is open for writing, and the lock is; one that
            # the kernel makes after an error is not. For who looks up a name, this is the same.
            _root("mount", "--bind", str(disk), str(disk))
            _root("mount", "-o", "remount,bind,ro", str(disk))

        mend = partial(_root, "umount", "-l", str(disk))
        yield Ground(folder / "run", str(disk / "c"), read_only, mend)


@contextlib.contextmanager
def lost_mount(folder: Path) -> Iterator[Ground]:
    """Checkpoints on a disk that goes away, and with it all that was on it, until it comes back."""
    with small_disk(folder / "disk") as disk, small_disk(folder / "elsewhere") as other:
        yield Ground(
            folder / "run",
            str(disk / "c"),
            # What is mounted over it hides it; the folder seen meanwhile is another, empty one.
            lambda: _root("mount", "--bind", str(other), str(disk)),
            partial(_root, "umount", "-l", str(disk)),
            visible=False,
        )


def _root(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def failing_store(folder: Path, trouble: Callable[[], Trouble]) -> Iterator[Ground]:
    """Checkpoints in an object store that is in trouble for a while."""
    with ObjectStore() as store:

        def break_it() -> None:
            store.trouble = trouble()

        def mend() -> None:
            store.trouble = no_trouble

        yield Ground(
            folder / "run",
            store.new_address(),
            break_it,
            mend,
            env=store.environment,
            visible=False,
        )


def trial(zygote: Zygote, folder: Path, name: str, ground: Ground, *, ranks: int = 2) -> Outcome:
    """One run that meets the fault and outlives it."""
    outcome = Outcome(name)
    recipe = _write_recipe(folder, ground.checkpoints)
    argv = ["train", "--from-file", str(recipe), "--run", str(ground.run)]
    output = folder / "out"
    processes = zygote.start_ranks(argv, ranks, ground.env, cwd=folder, output=output)
    spoken = processes[0]
    try:
        _await(lambda: len(_durable(spoken)) >= 3, processes, 120)
        _judge(outcome, ground, spoken, processes)
        for process in processes:
            process.send(signal.SIGTERM)
        codes = [process.wait(120) for process in processes]
        if codes != [75] * ranks:
            outcome.wrong.append(f"exit codes {codes}")
        outcome.wrong += _after(ground)
    except (AssertionError, TimeoutError) as error:
        outcome.wrong.append(f"{error}: {spoken.output()[-1500:]}")
    finally:
        for process in processes:
            process.kill()
    return outcome


def _judge(outcome: Outcome, ground: Ground, spoken: Process, processes: Sequence[Process]) -> None:
    place = open_place(ground.checkpoints or ground.run / "checkpoints")
    ground.break_it()
    broken_at, failures = time.monotonic(), len(_failed(spoken))
    steps = _steps(spoken)
    _await(lambda: len(_failed(spoken)) > failures, processes, FAULT_SECONDS)
    if ground.visible:
        before = set(place.folders())
        time.sleep(max(0.0, broken_at + FAULT_SECONDS - time.monotonic()))
        gone = before - set(place.folders())
        if gone:
            outcome.wrong.append(f"removed during the fault: {sorted(gone)}")
        outcome.kept = len(before)
    time.sleep(max(0.0, broken_at + FAULT_SECONDS - time.monotonic()))
    outcome.steps_in_fault = _steps(spoken) - steps
    outcome.failures_told = len(_failed(spoken)) - failures
    if outcome.steps_in_fault < 2 * SAVE_EVERY:
        outcome.wrong.append(
            f"only {outcome.steps_in_fault} steps in {FAULT_SECONDS:.0f} s of fault"
        )
    durable = len(_durable(spoken))
    ground.mend()
    mended = time.monotonic()
    found = find_checkpoint(place, "auto")
    if found is None or found.step < max(_durable(spoken)[:durable]):
        outcome.wrong.append(f"after the fault the newest that verifies is {found}")
    _await(lambda: len(_durable(spoken)) > durable, processes, 120)
    outcome.seconds_to_save = time.monotonic() - mended


def _after(ground: Ground) -> list[str]:
    """What is wrong with what a stopped run left."""
    wrong = []
    steps = [event["step"] for event in events_of(ground.run, "step")]
    if steps != list(range(1, len(steps) + 1)):
        wrong.append(f"the log lacks steps: it has {len(steps)}, up to {max(steps)}")
    found = find_checkpoint(open_place(ground.checkpoints or ground.run / "checkpoints"), "auto")
    if found is None or found.step != steps[-1]:
        wrong.append(f"the last step is {steps[-1]}, the newest checkpoint {found}")
    return wrong


def _write_recipe(folder: Path, checkpoints: str) -> Path:
    write_corpus(folder)
    recipe = tiny_recipe(folder, steps=1_000_000)
    recipe = replace(
        recipe,
        checkpoint=replace(recipe.checkpoint, every=SAVE_EVERY, folder=checkpoints),
        validation=replace(recipe.validation, every=0),
        telemetry=replace(recipe.telemetry, console="plain", samples=False),
    )
    file = folder / "recipe.toml"
    file.write_text(to_toml(recipe))
    return file


def _steps(process: Process) -> int:
    return max(map(int, _STEP.findall(process.output())), default=0)


def _durable(process: Process) -> list[int]:
    return [
        int(step) for step, state in _CHECKPOINT.findall(process.output()) if state == "durable"
    ]


def _failed(process: Process) -> list[int]:
    return [int(step) for step, state in _CHECKPOINT.findall(process.output()) if state == "failed"]


def _await(happened: Callable[[], bool], processes: Sequence[Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        ended = [process.poll() for process in processes]
        assert not any(code is not None for code in ended), f"it ended: {ended}"
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain"
        time.sleep(0.02)


GROUNDS: dict[str, Callable[[Path], contextlib.AbstractContextManager[Ground]]] = {
    "full disk, log and all": full_disk,
    "read-only remount": read_only_remount,
    "lost mount": lost_mount,
    "S3 answers 500": lambda folder: failing_store(folder, lambda: fail_with(500)),
    "S3 hangs up": lambda folder: failing_store(folder, lambda: hang_up(1 << 60)),
}
NEED_ROOT = ("full disk, log and all", "read-only remount", "lost mount")


def trials(names: Sequence[str] = tuple(GROUNDS)) -> tuple[list[str], list[str]]:
    """The trials of these names; the table, and what was wrong."""
    lines = [
        "| fault | steps during 30 s of it | failures told | older checkpoints kept |"
        " seconds to the next save | wrong |",
        "|---|---|---|---|---|---|",
    ]
    wrong = []
    with Zygote() as zygote:
        for name in names:
            if name in NEED_ROOT and os.geteuid() != 0:
                lines.append(f"| {name} | not tried: mounting takes root | | | | |")
                continue
            with (
                tempfile.TemporaryDirectory(prefix="faults-") as folder,
                GROUNDS[name](Path(folder)) as ground,
            ):
                o = trial(zygote, Path(folder), name, ground)
            kept = str(o.kept) if ground.visible else "all, looked at afterwards"
            lines.append(
                f"| {name} | {o.steps_in_fault:,} | {o.failures_told} | {kept} |"
                f" {o.seconds_to_save:.1f} | {len(o.wrong)} |"
            )
            print(lines[-1], *o.wrong, sep="\n", file=sys.stderr, flush=True)
            wrong += [f"{name}: {each}" for each in o.wrong]
    return lines, wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", default=list(GROUNDS))
    lines, wrong = trials(parser.parse_args().names)
    print(*lines, *wrong, sep="\n")
    sys.exit(1 if wrong else 0)
