"""A replica group is killed again and again; the other goes on, and the answer stays the same.

    python tests/reliability/replicas.py [--steps N] [--kills N] [--seed N]

Two groups of two ranks each train together. At a random moment all ranks of one are killed at once
(SIGKILL), and a moment later it is started again; once both take part, it is another one's turn.
Compared with the same run by one process that nobody kills: the loss of every step, and samples.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from reliability.agents import write_slow_recipe
from reliability.zygote import Process, Zygote, free_port
from tiny_runs import events_of, steps_of, write_corpus

RANKS = 2
"""Of each group."""
GROUPS = 2
ALONE = -1
"""In the place of a group's number: the run without groups."""
SILENT_SECONDS = "1"
"""After which the lighthouse counts a group as gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """What it cost that a group was killed."""

    group: int
    at_step: int
    """The last step in the log of the survivor."""
    repeated: int
    """Steps that the survivor began and had to begin again."""
    seconds_to_go_on: float
    """Until the next step was done."""
    away: int
    """Steps until the group took part again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a trial has shown."""

    steps: int
    losses: tuple[Loss, ...]
    restarts: int
    """Starts of the survivors beyond their first: 0 where none had to start again."""
    whole: bool
    """Whether the groups together logged every step, and no group a step twice in one start."""
    same_samples: bool
    """Whether each step had the samples, in their order, of the run without faults."""
    loss_deviation: float
    """Largest relative difference of a step's loss from that run's."""
    final_deviation: float
    """The same of the last step."""
    equal_ends: bool
    """Whether both groups logged the same last step, to the last bit."""

    def lines(self) -> list[str]:
        """For people."""
        return [
            *(
                f"group {one.group} killed after step {one.at_step}: {one.repeated} step repeated, "
                f"{one.seconds_to_go_on:.1f} s to the next step, back after {one.away} steps"
                for one in self.losses
            ),
            f"every one of {self.steps} steps taken once: {self.whole}; survivors that had to"
            f" start again: {self.restarts}",
            f"samples of each step those of a run without faults: {self.same_samples}",
            f"largest relative deviation of a loss: {self.loss_deviation:.1e},"
            f" of the last: {self.final_deviation:.1e}; both groups end alike: {self.equal_ends}",
        ]


@dataclass
class Groups:
    """Replica groups and their lighthouse, in a folder that holds `slow.py`; a context."""

    zygote: Zygote
    folder: Path
    options: tuple[str, ...] = ()
    nproc: int = RANKS
    running: dict[int, list[Process]] = field(default_factory=dict)

    def __enter__(self) -> Groups:
        self.address = f"127.0.0.1:{free_port()}"
        self.lighthouse = self.zygote.start(
            ["lighthouse", "--listen", self.address, "--silent-seconds", SILENT_SECONDS],
            cwd=self.folder,
            output=self.folder / "lighthouse.txt",
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for group in list(self.running):
            self.kill(group)
        self.lighthouse.kill()

    def start(self, group: int, *further: str) -> None:
        """Starts a group, or starts it again."""
        here = ["--replicas.lighthouse", self.address, "--replicas.groups", str(GROUPS)]
        argv = ["train", "slow.py:slow", "--run", self.run(group).name, *here]
        argv += ["--replicas.group", str(group), *self.options, *further]
        self.running[group] = self.zygote.start_ranks(
            argv, self.nproc, cwd=self.folder, output=self.folder / f"group-{group}.txt"
        )

    def start_alone(self) -> None:
        """Starts the same run by one process that nobody kills; mostly it sleeps, as they do."""
        argv = ["train", "slow.py:slow", "--run", self.run(ALONE).name]
        self.running[ALONE] = self.zygote.start_ranks(
            argv, 1, cwd=self.folder, output=self.folder / "alone.txt"
        )

    def kill(self, group: int) -> None:
        """Ends all ranks of a group at once."""
        for process in self.running.pop(group):
            process.kill()

    def wait(self, group: int) -> list[int]:
        """Exit codes of its ranks, once all have ended."""
        return [process.wait(600) for process in self.running.pop(group)]

    def run(self, group: int) -> Path:
        """The run folder of a group."""
        return self.folder / f"run-{group}"

    def events(self, group: int, kind: str) -> list[dict[str, Any]]:
        """Of its run so far."""
        there = (self.run(group) / "events.jsonl").is_file()
        return events_of(self.run(group), kind) if there else []

    def step(self, group: int) -> int:
        """The last step that it logged."""
        return max((event["step"] for event in self.events(group, "step")), default=0)

    def members(self, group: int) -> str:
        """Who takes part, as it was told last."""
        said = [event["message"] for event in self.events(group, "message")]
        told = [text for text in said if text.startswith("groups that take part")]
        return told[-1].rpartition(": ")[2] if told else ""

    def until(self, enough: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
        """Waits for something.

        Raises:
            AssertionError: it took longer than that.
        """
        deadline = time.monotonic() + seconds
        while not enough():
            said = "\n".join(
                f"{path.name}: {path.read_text(errors='replace')[-1500:]}"
                for path in sorted(self.folder.glob("*.txt*"))
            )
            assert time.monotonic() < deadline, f"{what} took over {seconds} s\n{said}"
            time.sleep(0.05)


def trial(
    zygote: Zygote,
    folder: Path,
    *,
    steps: int = 300,
    kills: int = 5,
    seconds_per_microbatch: float = 0.05,
    options: tuple[str, ...] = (),
    seed: int = 0,
) -> Outcome:
    """Kills groups of a run and compares it with one without faults.

    Raises:
        AssertionError: the run did not go on, or did not end well.
    """
    write_corpus(folder)
    write_slow_recipe(folder / "slow.py", steps=steps, seconds=seconds_per_microbatch)
    draw = random.Random(seed)
    with Groups(zygote, folder, options) as groups:
        for group in range(GROUPS):
            groups.start(group)
        groups.start_alone()
        both = ", ".join(map(str, range(GROUPS)))
        losses = []
        for number in range(kills):
            groups.until(
                lambda: all(groups.members(group) == both for group in range(GROUPS)),
                "meeting",
            )
            victim = number % GROUPS
            losses.append(_lose(groups, victim, draw.uniform(0.0, 0.6), both))
        codes = [code for group in range(GROUPS) for code in groups.wait(group)]
        assert codes == [0] * (GROUPS * RANKS), codes
        assert groups.wait(ALONE) == [0]
        return _outcome(groups, tuple(losses), steps, kills)


def _lose(groups: Groups, victim: int, delay: float, both: str) -> Loss:
    """Kills a group after a while in which both take part, and waits until they do again."""
    survivor = 1 - victim
    begun = groups.step(survivor)
    groups.until(lambda: groups.step(survivor) >= begun + 2, "a step of both")
    time.sleep(delay)
    broken = len(_broken_off(groups, survivor))
    groups.kill(victim)
    killed, at_step = time.monotonic(), groups.step(survivor)
    groups.until(lambda: groups.members(survivor) == str(survivor), "going on alone")
    groups.until(lambda: groups.step(survivor) > at_step, "the next step")
    seconds = time.monotonic() - killed
    repeated = len(set(_broken_off(groups, survivor)[broken:]))
    groups.start(victim)
    groups.until(lambda: groups.members(survivor) == both, "coming back")
    away = groups.step(survivor) - at_step
    return Loss(
        group=victim, at_step=at_step, repeated=repeated, seconds_to_go_on=seconds, away=away
    )


def _broken_off(groups: Groups, group: int) -> list[int]:
    """The steps that it had to begin again; one may be named more than once."""
    warnings = groups.events(group, "warning")
    return [event["step"] + 1 for event in warnings if event["where"] == "replicas"]


def _outcome(groups: Groups, losses: tuple[Loss, ...], steps: int, kills: int) -> Outcome:
    expected = {event["step"]: event for event in steps_of(groups.run(ALONE))}
    logs = [steps_of(groups.run(group)) for group in range(GROUPS)]
    seen = [event for log in logs for event in log]
    deviations = {
        event["step"]: abs(event["loss"] / expected[event["step"]]["loss"] - 1) for event in seen
    }
    starts = sum(len(groups.events(group, "start")) for group in range(GROUPS))
    return Outcome(
        steps=steps,
        losses=losses,
        restarts=starts - GROUPS - kills,
        whole=all(
            {event["step"] for event in seen} == set(range(1, steps + 1))
            and len(log) == len({event["step"] for event in log})
            for log in logs
        ),
        same_samples=all(
            event["sample_ids"] == expected[event["step"]]["sample_ids"] for event in seen
        ),
        loss_deviation=max(deviations.values()),
        final_deviation=deviations[steps],
        equal_ends=all(log[-1] == logs[0][-1] for log in logs),
    )


def main() -> None:
    """Runs a trial and prints what it has shown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="replicas-") as folder, Zygote() as zygote:
        began = time.monotonic()
        outcome = trial(
            zygote,
            Path(folder),
            steps=arguments.steps,
            kills=arguments.kills,
            seed=arguments.seed,
        )
    print(*outcome.lines(), sep="\n")
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
