"""Hosts come and go under torchrun: the run goes on with those that are there, with one answer.

    python tests/reliability/elastic.py [--steps N] [--keep FOLDER]

Two agents with two ranks each train together; one is killed with its ranks; the run goes on with
two ranks; the agent is started again, and the run goes on with four. Compared with the same run by
one process that nobody interrupts: every sample in its place, and the loss of every step.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from reliability.agents import Agent, until, write_slow_recipe
from reliability.zygote import free_port
from tiny_runs import events_of, steps_of, write_corpus

EVERY = 5
"""Steps between checkpoints."""
BETWEEN = 4
"""Steps that each world takes at least, before it changes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a trial has shown."""

    steps: int
    """Of the whole run."""
    worlds: tuple[int, ...]
    """Ranks of each start of the run."""
    resumed_from: tuple[int | None, ...]
    """Step at which each start went on."""
    repeated: int
    """Steps that were taken twice, because a host was lost after they were."""
    seconds_to_go_on: tuple[float, ...]
    """From each change of hosts to the next step."""
    same_samples: bool
    """Whether every step had the samples, in their order, of the run without interruptions."""
    loss_deviation: float
    """Largest relative difference of a step's loss from that run's."""
    norm_deviation: float
    """The same of the gradient norm."""

    def lines(self) -> list[str]:
        """For people."""
        waits = ", ".join(f"{seconds:.1f} s" for seconds in self.seconds_to_go_on)
        return [
            f"ranks of each start: {' -> '.join(map(str, self.worlds))};"
            f" resumed from {self.resumed_from}; {self.repeated} of {self.steps} steps repeated",
            f"from a change of hosts to the next step: {waits}",
            f"sample ids of all steps equal to those without interruptions: {self.same_samples}",
            f"largest relative deviation: loss {self.loss_deviation:.1e},"
            f" gradient norm {self.norm_deviation:.1e}",
        ]


def trial(folder: Path, *, steps: int = 40, seconds_per_step: float = 0.25) -> Outcome:
    """4 ranks -> 2 -> 4, in a folder of its own.

    Raises:
        AssertionError: a change of hosts did not lead to a run that goes on.
    """
    write_corpus(folder)
    write_slow_recipe(folder / "slow.py", steps=steps, seconds=seconds_per_step)
    write_slow_recipe(folder / "alone.py", steps=steps, seconds=0.0)
    save = ["--checkpoint.every", str(EVERY)]
    train = ["slow.py:slow", "--run", "run", *save]
    endpoint = f"127.0.0.1:{free_port()}"

    def start(name: str, serves: bool = False) -> Agent:
        return Agent(train, endpoint=endpoint, folder=folder, name=name, serves=serves)

    with start("host-0", serves=True) as first:
        with start("host-1") as second:
            until(lambda: has_come(folder, [4], 2 * EVERY + 2), [first, second], "4 ranks")
            second.kill()
            waits = [goes_on(folder, 1, [first], "2 ranks")]
        until(lambda: has_come(folder, [4, 2], BETWEEN), [first], "steps of 2 ranks")
        with start("host-1-again") as second:
            waits.append(goes_on(folder, 2, [first, second], "4 ranks again"))
            codes = first.wait(), second.wait()
            assert codes == (0, 0), first.said() + second.said()
    alone = Agent(
        ["alone.py:slow", "--run", "alone", *save],
        endpoint=endpoint, folder=folder, name="alone", nodes="1", nproc=1, max_restarts=0,
    )  # fmt: skip
    with alone:
        assert alone.wait() == 0, alone.said()
    return compare(folder / "run", folder / "alone", waits)


def has_come(folder: Path, worlds: list[int], steps: int) -> bool:
    """Whether the run was started with these worlds, and took so many steps since."""
    events = _events(folder / "run")
    starts = [event for event in events if event["kind"] == "start"]
    if [event["world_size"] for event in starts] != worlds:
        return False
    taken = events[events.index(starts[-1]) :]
    return sum(event["kind"] == "step" for event in taken) >= steps


def goes_on(
    folder: Path,
    starts: int,
    agents: list[Agent],
    what: str,
    meanwhile: Callable[[], None] = lambda: None,
) -> float:
    """Waits for the first step of the start after the first `starts`; returns the seconds."""
    began = time.monotonic()

    def steps_came() -> bool:
        meanwhile()
        events = _events(folder / "run")
        found = [place for place, event in enumerate(events) if event["kind"] == "start"]
        return len(found) > starts and any(e["kind"] == "step" for e in events[found[starts] :])

    until(steps_came, agents, what)
    return time.monotonic() - began


def _events(run: Path) -> list[dict[str, Any]]:
    return events_of(run) if (run / "events.jsonl").exists() else []


def compare(run: Path, alone: Path, waits: list[float]) -> Outcome:
    """The run that hosts came to and left, beside the one that nobody interrupted.

    Of a step that was taken twice both are compared.
    """
    starts = events_of(run, "start")
    oracle = {step["step"]: step for step in steps_of(alone)}
    found = steps_of(run)
    assert {step["step"] for step in found} == set(oracle), "steps are missing"

    def deviation(name: str) -> float:
        return max(abs(step[name] / oracle[step["step"]][name] - 1) for step in found)

    exact = ("samples", "sample_ids", "tokens", "tokens_total", "learning_rate")
    return Outcome(
        steps=len(oracle),
        worlds=tuple(start["world_size"] for start in starts),
        resumed_from=tuple(start["resumed_from"] for start in starts),
        repeated=len(found) - len(oracle),
        seconds_to_go_on=tuple(waits),
        same_samples=all(
            step[name] == oracle[step["step"]][name] for step in found for name in exact
        ),
        loss_deviation=deviation("loss"),
        norm_deviation=deviation("gradient_norm"),
    )


def main() -> int:
    """Runs the trial and prints what it has shown; 1 where that is not what is promised."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="of the run (default: 60)")
    parser.add_argument("--keep", type=Path, help="folder for the run and all logs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="elastic-") as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        outcome = trial(folder.absolute(), steps=options.steps)
    print(*outcome.lines(), sep="\n")
    kept = outcome.same_samples and outcome.loss_deviation <= 1e-5
    return 0 if kept and outcome.worlds == (4, 2, 4) else 1


if __name__ == "__main__":
    sys.exit(main())
