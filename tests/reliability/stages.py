"""SIGKILL at random moments of a run with stages: it sees what the undisturbed run sees, exactly.

    python tests/reliability/stages.py [--kills 10]

A run of three stages, with another mixture at the first border and a longer context, with other
rotations, at the second, on one rank and on two. One command is given again and again, and killed
each time at a random moment; two of three kills wait for a border to be near. What the lives have
told together, each step's samples, loss and gradient norm, each look at held-out text and the last
weights, is compared with a run that nobody interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from armillary.recipe.recipe import Recipe
from armillary.recipe.stages import spans_of
from armillary.recipe.toml import to_toml
from reliability.zygote import Process, Zygote
from staged_runs import staged_recipe, told, write_corpora
from tiny_runs import events_of

RECIPE = "recipe.toml"
STEPS_PER_KILL = 12
"""Of the budget: as a rule more than a life gets done, so that it lasts until the last kill."""
START_SECONDS = 120.0


@dataclass
class Chain:
    """One run that is killed again and again, and what that has shown."""

    folder: Path
    ranks: int
    borders: list[int]
    kills: int = 0
    near_a_border: int = 0
    """Kills within two steps of one: before it, while it is crossed, or after it."""
    resumed_at_a_border: int = 0
    repeated: int = 0
    """Steps that were taken more than once."""
    steps: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def run(self) -> Path:
        """The folder of the run that is killed."""
        return self.folder / "run"


def run_chain(zygote: Zygote, folder: Path, ranks: int, kills: int) -> Chain:
    """Kills, then lets the run end, and compares it with one that was never killed."""
    folder.mkdir()
    write_corpora(folder)
    third = STEPS_PER_KILL * kills // 3
    recipe = staged_recipe(folder, (third, third, third))
    (folder / RECIPE).write_text(to_toml(recipe))
    chain = Chain(folder, ranks, [span.last for span in spans_of(recipe)[:-1]])
    draw = random.Random(ranks)
    while chain.kills < kills and not chain.wrong:
        _live_and_die(zygote, chain, draw, kills)
    for run in (chain.run, folder / "whole"):
        processes = _start(zygote, run, ranks)
        codes = [process.wait(1800) for process in processes]
        if any(codes):
            chain.wrong.append(f"{run.name} ended with {codes}: {_said(processes)}")
            return chain
    _compare(chain, folder / "whole", recipe)
    return chain


def _live_and_die(zygote: Zygote, chain: Chain, draw: random.Random, wanted: int) -> None:
    """One life of so many that are wanted, from the command to its end by SIGKILL."""
    begun, number = _last_step(chain.run), chain.kills
    border = chain.borders[number * len(chain.borders) // wanted]  # of each, an equal share
    anywhere = number % 3 == 2
    until = begun + draw.randint(1, 3) if anywhere else border + draw.choice((-1, 0, 0, 0, 1))
    size = _size(chain.run)
    processes = _start(zygote, chain.run, chain.ranks)
    deadline = time.monotonic() + START_SECONDS
    while not _has_come(chain.run, size, until) and all(one.poll() is None for one in processes):
        if time.monotonic() > deadline:
            chain.wrong.append(f"step {until} was not reached: {_said(processes)}")
            break
        time.sleep(0.001)
    time.sleep(draw.uniform(0.0, 0.15 if anywhere else 0.08))
    for process in processes:
        process.send(9)
    codes = [process.wait(120) for process in processes]
    if -9 not in codes:
        chain.wrong.append(f"life {chain.kills} ended by itself with {codes}: {_said(processes)}")
        return
    chain.kills += 1
    at = _last_step(chain.run)
    chain.near_a_border += any(abs(at - border) <= 2 for border in chain.borders)


def _start(zygote: Zygote, run: Path, ranks: int) -> list[Process]:
    argv = ["train", "--from-file", str(run.parent / RECIPE), "--run", str(run)]
    return zygote.start_ranks(argv, ranks, cwd=run.parent, output=run.parent / f"{run.name}.out")


def _size(run: Path) -> int:
    log = run / "events.jsonl"
    return log.stat().st_size if log.exists() else 0


def _has_come(run: Path, size: int, step: int) -> bool:
    """Whether this life has begun to tell, and the run has come to a step."""
    return _size(run) > size and _last_step(run) >= step


def _last_step(run: Path) -> int:
    """The largest step that the log tells of; its last line may be cut short."""
    log = run / "events.jsonl"
    if not log.exists():
        return 0
    lines = log.read_bytes().split(b'"kind":"step"')[1:]
    steps = (line.partition(b'"step":')[2].split(b",")[0] for line in lines)
    return max((int(step) for step in steps if step.isdigit()), default=0)


def _compare(chain: Chain, whole: Path, recipe: Recipe) -> None:
    ours, theirs = told(chain.run), told(whole)
    for what in sorted(ours.keys() | theirs.keys()):
        if ours.get(what) != theirs.get(what):
            chain.wrong.append(f"{what[0]} {what[2]} of step {what[1]} differs")
    every = events_of(chain.run, "step")
    wanted = {what[1]: value for what, value in theirs.items() if what[0] == "step"}
    chain.wrong += [
        f"step {event['step']} was another before it was repeated"
        for event in every
        if event["sample_ids"] != wanted[event["step"]]["sample_ids"]
        or event["loss"] != wanted[event["step"]]["loss"]
    ]
    if _weights(chain.run, recipe.total_steps) != _weights(whole, recipe.total_steps):
        chain.wrong.append("the last weights differ")
    starts = events_of(chain.run, "start")
    chain.resumed_at_a_border = sum(start["resumed_from"] in chain.borders for start in starts)
    chain.steps, chain.repeated = recipe.total_steps, len(every) - len(wanted)


def _weights(run: Path, step: int) -> dict[str, Any]:
    folder = run / "checkpoints" / f"step-{step:08d}"
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.safetensors"))
    }


def _said(processes: Sequence[Process]) -> str:
    return " / ".join(process.output()[-600:].strip() for process in processes)


def table(chains: Sequence[Chain]) -> list[str]:
    """What was measured, as lines of Markdown."""
    lines = [
        "| ranks | steps | kills | near a border | resumes at a border | steps repeated | wrong |",
        "|---|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {c.ranks} | {c.steps} | {c.kills} | {c.near_a_border} | {c.resumed_at_a_border} |"
        f" {c.repeated} | {len(c.wrong)} |"
        for c in chains
    ]


def trials(kills: int = 10) -> tuple[list[str], list[str]]:
    """Both chains; the table, and what was wrong."""
    chains = []
    with tempfile.TemporaryDirectory(prefix="stages-") as folder, Zygote() as zygote:
        for ranks in (1, 2):
            chains.append(run_chain(zygote, Path(folder, str(ranks)), ranks, kills))
            print(table(chains)[-1], *chains[-1].wrong[:5], sep="\n", file=sys.stderr, flush=True)
    return table(chains), [f"{c.ranks} ranks: {wrong}" for c in chains for wrong in c.wrong]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    lines, wrong = trials(parser.parse_args().kills)
    print(*lines, *wrong, sep="\n")
    sys.exit(1 if wrong else 0)
