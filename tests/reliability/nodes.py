"""Two hosts train together; the cable of one is pulled and put back; the run goes on.

    python tests/reliability/nodes.py [--steps N] [--keep FOLDER]

The hosts are network namespaces of this machine (root only), each with an agent of torchrun and two
ranks, and one run folder for both. First the cable is away for a moment, which nobody need notice.
Then for longer than the watchdog waits: the ranks of the first host end and name the second's, its
agent goes on with what it has, and when the cable is back the second host joins again. Compared
with the same run by one process that nobody interrupts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from reliability.agents import Agent, until, write_slow_recipe
from reliability.elastic import EVERY, Outcome, compare, goes_on, has_come
from reliability.network import INTERFACE, Network, why_not
from tiny_runs import events_of, write_corpus

PORT = 29_400
WATCHED_SECONDS = 8
"""How long a run may stand still before its watchdog ends it."""
MOMENT_SECONDS = 3
"""How long the cable is away at first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unplugged:
    """What a trial has shown."""

    outcome: Outcome
    starts_after_a_moment: int
    """Of the run, while the cable was away for a moment; 0: nobody noticed."""
    named: str
    """What the run said of the host that could not be reached."""

    def lines(self) -> list[str]:
        """For people."""
        noticed = f"{self.starts_after_a_moment} restarts"
        return [
            f"cable away for {MOMENT_SECONDS} s: {noticed}",
            f"cable away for longer: {self.named}",
            *self.outcome.lines(),
        ]


def trial(folder: Path, *, steps: int = 60, seconds_per_step: float = 0.25) -> Unplugged:
    """Both hosts, one, both, in a folder of its own.

    Raises:
        AssertionError: the run did not go on.
    """
    write_corpus(folder)
    write_slow_recipe(folder / "slow.py", steps=steps, seconds=seconds_per_step)
    write_slow_recipe(folder / "alone.py", steps=steps, seconds=0.0)
    save = ["--checkpoint.every", str(EVERY)]
    watched = ["--watchdog.step-seconds", str(WATCHED_SECONDS), "--watchdog.grace-seconds", "2"]
    with Network(2) as network:

        def start(host: int) -> Agent:
            return Agent(
                ["slow.py:slow", "--run", "run", *save, *watched],
                endpoint=f"{network.address(0)}:{PORT}",
                folder=folder,
                name=f"host-{host}",
                serves=host == 0,
                prefix=network.inside(host),
                options=["--local-addr", network.address(host)],
                environment={"GLOO_SOCKET_IFNAME": INTERFACE},
            )

        with ExitStack() as stack:
            both, run = [stack.enter_context(start(host)) for host in range(2)], folder / "run"

            def again() -> None:
                """What a batch system does with a host whose agent has given up."""
                if both[1].process.poll():
                    both[1] = stack.enter_context(start(1))

            until(lambda: has_come(folder, [4], EVERY), both, "4 ranks")
            network.unplug(1)
            time.sleep(MOMENT_SECONDS)
            network.plug(1)
            taken = len(events_of(run, "step"))
            until(lambda: len(events_of(run, "step")) > taken, both, "a step after a moment")
            starts = len(events_of(run, "start"))
            network.unplug(1)
            waits = [goes_on(folder, starts, both[:1], "2 ranks")]
            network.plug(1)
            waits.append(goes_on(folder, starts + 1, both, "4 ranks again", meanwhile=again))
            assert [agent.wait() for agent in both] == [0, 0], both[0].said() + both[1].said()
    alone = Agent(
        ["alone.py:slow", "--run", "alone", *save],
        endpoint=f"127.0.0.1:{PORT}", folder=folder, name="alone", nodes="1", nproc=1,
        max_restarts=0,
    )  # fmt: skip
    with alone:
        assert alone.wait() == 0, alone.said()
    outcome = compare(run, folder / "alone", waits)
    named = next((error["message"] for error in events_of(run, "error")), "")
    return Unplugged(outcome=outcome, starts_after_a_moment=starts - 1, named=named)


def main() -> int:
    """Runs the trial and prints what it has shown; 1 where that is not what is promised."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80, help="of the run (default: 80)")
    parser.add_argument("--keep", type=Path, help="folder for the run and all logs")
    options = parser.parse_args()
    if reason := why_not():
        print(f"skipped: {reason}")
        return 0
    with tempfile.TemporaryDirectory(prefix="nodes-") as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        found = trial(folder.absolute(), steps=options.steps)
    print(*found.lines(), sep="\n")
    outcome = found.outcome
    kept = outcome.same_samples and outcome.loss_deviation <= 1e-5
    return 0 if kept and outcome.worlds[-2:] == (2, 4) else 1


if __name__ == "__main__":
    sys.exit(main())
