"""SIGKILL at random moments: what was reported durable is found again, and the run goes on exactly.

    python tests/reliability/kills.py [--kills 200]

Four chains of lives: saving synchronously and asynchronously, on one rank and on two. In a chain
one command is given again and again, and killed each time at a random moment; every other kill
waits for a save to be under way. On two ranks sometimes one alone is killed. Everything is compared
with a run that nobody interrupted: the values of every step, and the checksum of each file of every
checkpoint that a life left behind.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from armillary.recipe.toml import to_toml
from reliability.zygote import Process, Zygote
from tiny_runs import MEASURED, events_of, tiny_recipe, write_corpus

SAVE_EVERY = 3
RECIPE = "recipe.toml"
STEPS_PER_KILL = 25
"""Of the budget: more than one life gets done, so that it lasts until the last kill."""
START_SECONDS = 90.0
CHAINS = tuple((ranks, mode) for ranks in (1, 2) for mode in ("synchronous", "asynchronous"))

Files = dict[str, str]
"""Checksums of a checkpoint's files, by name."""


@dataclass
class Chain:
    """One run that is killed again and again, and what the kills have shown."""

    folder: Path
    ranks: int
    mode: str
    kills: int = 0
    inside_a_save: int = 0
    """Kills that left an unfinished checkpoint behind."""
    one_rank_alone: int = 0
    resumes: int = 0
    repeated: int = 0
    """Steps that were taken more than once."""
    checkpoints: dict[int, Files] = field(default_factory=dict)
    """What lives left behind, by step."""
    wrong: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.mode}, {self.ranks} rank{'s' if self.ranks > 1 else ''}"

    @property
    def run(self) -> Path:
        """The folder of the run that is killed."""
        return self.folder / "run"


def run_chain(zygote: Zygote, folder: Path, ranks: int, mode: str, kills: int) -> Chain:
    """Kills, then lets the run end, and compares it with one that was never killed."""
    folder.mkdir()
    chain = Chain(folder, ranks, mode)
    draw = random.Random(f"{ranks} {mode}")
    _write_recipe(folder, mode, steps=STEPS_PER_KILL * kills)
    while chain.kills < kills and not chain.wrong:
        _live_and_die(zygote, chain, draw)
    whole = folder / "whole"
    for run, more in ((chain.run, []), (whole, ["--checkpoint.keep-last", "10000"])):
        processes = _start(zygote, run, ranks, *more)
        codes = [process.wait(1800) for process in processes]
        if any(codes):
            chain.wrong.append(f"{run.name} ended with {codes}: {_said(processes)}")
            return chain
    chain.wrong += [*_older_than_reported(chain), *_unequal(chain, whole)]
    return chain


def _live_and_die(zygote: Zygote, chain: Chain, draw: random.Random) -> None:
    """One life, from the command to its end by SIGKILL."""
    in_save, size = chain.kills % 2 == 0, _size(chain.run)
    # Some die before their first step: while they start, find the checkpoint or load it. One alone
    # would be waited for there, until its launcher ends the others; none is here.
    steps = draw.random() < 0.9
    alone = steps and chain.ranks > 1 and draw.random() < 0.3
    processes = _start(zygote, chain.run, chain.ranks)
    if steps:
        wanted = draw.randint(1, 8)
        _await(lambda: _steps_since(chain.run, size) >= wanted, processes)
        if in_save:
            _await(lambda: bool(_unfinished(chain.run)), processes)
    time.sleep(draw.uniform(0.0, 0.008 if in_save else 0.1))
    for process in [draw.choice(processes)] if alone else processes:
        process.send(9)
    codes = [process.wait(120) for process in processes]
    if -9 not in codes:
        chain.wrong.append(f"life {chain.kills} ended by itself with {codes}: {_said(processes)}")
        return
    chain.kills += 1
    chain.one_rank_alone += alone
    chain.inside_a_save += bool(_unfinished(chain.run))
    for step, files in _checkpoints(chain.run).items():
        if chain.checkpoints.setdefault(step, files) != files:
            chain.wrong.append(f"life {chain.kills}: another checkpoint of step {step} than before")


def _start(zygote: Zygote, run: Path, ranks: int, *more: str) -> list[Process]:
    folder = run.parent
    argv = ["train", "--from-file", str(folder / RECIPE), "--run", str(run), *more]
    output = folder / f"{run.name}.out"
    return zygote.start_ranks(argv, ranks, cwd=folder, output=output)


def _write_recipe(folder: Path, mode: str, steps: int) -> None:
    write_corpus(folder)
    recipe = tiny_recipe(folder, steps=steps)
    asynchronous = mode == "asynchronous"
    recipe = replace(
        recipe,
        checkpoint=replace(recipe.checkpoint, every=SAVE_EVERY, asynchronous=asynchronous),
        validation=replace(recipe.validation, every=0),
    )
    (folder / RECIPE).write_text(to_toml(recipe))


def _await(happened: Callable[[], bool], processes: Sequence[Process]) -> None:
    """Until it has happened, or a process has ended."""
    deadline = time.monotonic() + START_SECONDS
    while not happened() and all(process.poll() is None for process in processes):
        assert time.monotonic() < deadline, f"nothing happened: {_said(processes)}"
        time.sleep(0.001)


def _size(run: Path) -> int:
    log = run / "events.jsonl"
    return log.stat().st_size if log.exists() else 0


def _steps_since(run: Path, size: int) -> int:
    """How many steps the log tells of beyond its first `size` bytes."""
    if _size(run) <= size:
        return 0
    with (run / "events.jsonl").open("rb") as log:
        log.seek(size)
        return log.read().count(b'"kind":"step"')


def _unfinished(run: Path) -> list[Path]:
    return list((run / "checkpoints").glob(".tmp-step-*"))


def _checkpoints(run: Path) -> dict[int, Files]:
    found = {}
    for manifest in (run / "checkpoints").glob("step-*/manifest.json"):
        content = json.loads(manifest.read_text())
        files = content["files"].items()
        found[int(content["step"])] = {name: str(file["sha256"]) for name, file in files}
    return found


def _older_than_reported(chain: Chain) -> list[str]:
    """Starts that went on from something older than the newest checkpoint reported durable."""
    newest, wrong = 0, []
    for event in events_of(chain.run):
        if event["kind"] == "checkpoint" and event["state"] == "durable":
            newest = max(newest, event["step"])
        if event["kind"] == "start":
            resumed = event["resumed_from"] or 0
            chain.resumes += resumed > 0
            if resumed < newest:
                wrong.append(f"went on from step {resumed}, but {newest} had been durable")
    return wrong


def _unequal(chain: Chain, whole: Path) -> list[str]:
    """Steps and checkpoints that are not those of the run that was never killed."""
    wrong = []
    wanted = {event["step"]: _measured(event) for event in events_of(whole, "step")}
    taken = events_of(chain.run, "step")
    chain.repeated = len(taken) - len({event["step"] for event in taken})
    wrong += [
        f"step {event['step']} differs"
        for event in taken
        if _measured(event) != wanted[event["step"]]
    ]
    missing = wanted.keys() - {event["step"] for event in taken}
    wrong += [f"step {step} was never taken" for step in sorted(missing)]
    files = _checkpoints(whole)
    for step, found in (chain.checkpoints | _checkpoints(chain.run)).items():
        names = found.keys() | files[step].keys()
        other = [name for name in sorted(names) if found.get(name) != files[step].get(name)]
        wrong += [f"checkpoint of step {step}: other {', '.join(other)}"] if other else []
    return wrong


def _measured(event: dict[str, Any]) -> dict[str, Any]:
    return {name: event[name] for name in MEASURED}


def _said(processes: Sequence[Process]) -> str:
    return " / ".join(process.output()[-600:].strip() for process in processes)


def table(chains: Sequence[Chain]) -> list[str]:
    """What was measured, as lines of Markdown."""
    lines = [
        "| chain | kills | inside a save | one rank alone | resumes | steps repeated |"
        " checkpoints compared | wrong |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {c.name} | {c.kills} | {c.inside_a_save} | {c.one_rank_alone} | {c.resumes} |"
        f" {c.repeated} | {len(c.checkpoints)} | {len(c.wrong)} |"
        for c in chains
    ]


def trials(kills: int = 200) -> tuple[list[str], list[str]]:
    """All chains; the table, and what was wrong."""
    chains = []
    with tempfile.TemporaryDirectory(prefix="kills-") as folder, Zygote() as zygote:
        for number, (ranks, mode) in enumerate(CHAINS):
            chain = run_chain(zygote, Path(folder, str(number)), ranks, mode, kills // len(CHAINS))
            chains.append(chain)
            print(table([chain])[-1], *chain.wrong[:5], sep="\n", file=sys.stderr, flush=True)
    return table(chains), [f"{c.name}: {wrong}" for c in chains for wrong in c.wrong]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    lines, wrong = trials(parser.parse_args().kills)
    print(*lines, *wrong, sep="\n")
    sys.exit(1 if wrong else 0)
