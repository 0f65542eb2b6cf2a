"""Damage to every kind of file of a checkpoint: detected, named, and the older one is used.

    python tests/reliability/corruption.py [--trials 240]

A run of two ranks leaves three checkpoints. Each trial damages the newest of a copy in one way, at
a random place, and asks what a resume would take: it must be the one before, with a reason that
names the damaged file. Every tenth trial runs `armillary train` itself.
"""

from __future__ import annotations

import argparse
import collections
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from armillary.checkpoint.find import find_checkpoint
from armillary.checkpoint.places.open import open_place
from armillary.foundation.errors import UserError
from armillary.recipe.toml import to_toml
from reliability.zygote import Zygote
from tiny_runs import events_of, tiny_recipe, write_corpus

STEPS = (4, 8, 12)
NEWEST, OLDER = "step-00000012", "step-00000008"
COMMAND_EVERY = 10

Damage = Callable[[Path, Path, random.Random], None]
"""Given a file, the same file of the older checkpoint, and what to draw from."""


def flip_a_bit(file: Path, older: Path, draw: random.Random) -> None:
    """One bit, anywhere."""
    data = bytearray(file.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def cut(file: Path, older: Path, draw: random.Random) -> None:
    """The end is missing."""
    data = file.read_bytes()
    file.write_bytes(data[: draw.randrange(len(data))])


def lengthen(file: Path, older: Path, draw: random.Random) -> None:
    """Something follows the end."""
    file.write_bytes(file.read_bytes() + draw.randbytes(draw.randrange(1, 100)))


def zero_a_block(file: Path, older: Path, draw: random.Random) -> None:
    """A block that was never written, as after a power cut."""
    data = bytearray(file.read_bytes())
    first = draw.randrange(len(data))
    while not any(data[first : first + 512]):  # such a block would be no damage
        first = draw.randrange(len(data))
    data[first : first + 512] = bytes(len(data[first : first + 512]))
    file.write_bytes(data)


def remove(file: Path, older: Path, draw: random.Random) -> None:
    """The file is gone."""
    file.unlink()


def swap(file: Path, older: Path, draw: random.Random) -> None:
    """The same file of another checkpoint."""
    shutil.copyfile(older, file)


def link_out(file: Path, older: Path, draw: random.Random) -> None:
    """A link to the very same bytes elsewhere: they may change any time."""
    elsewhere = file.parents[1] / f"elsewhere-{file.name}"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


DAMAGES: dict[str, Damage] = {
    "a flipped bit": flip_a_bit,
    "a cut file": cut,
    "a longer file": lengthen,
    "a block of zeros": zero_a_block,
    "a missing file": remove,
    "the file of another step": swap,
    "a link": link_out,
}


def make_run(zygote: Zygote, folder: Path) -> tuple[Path, Path]:
    """A finished run with three checkpoints; its recipe and its folder."""
    write_corpus(folder)
    recipe = tiny_recipe(folder, steps=STEPS[-1])
    checkpoint = replace(recipe.checkpoint, every=STEPS[0], keep_last=9)
    file = folder / "recipe.toml"
    file.write_text(to_toml(replace(recipe, checkpoint=checkpoint)))
    run = folder / "run"
    argv = ["train", "--from-file", str(file), "--run", str(run)]
    ranks = zygote.start_ranks(argv, 2, cwd=folder, output=folder / "out")
    codes = [rank.wait() for rank in ranks]
    assert codes == [0, 0], ranks[0].output()
    return file, run


def kinds_of(run: Path) -> dict[str, list[str]]:
    """Files of the newest checkpoint by kind: names that differ in numbers only are one kind."""
    kinds: dict[str, list[str]] = collections.defaultdict(list)
    for file in sorted((run / "checkpoints" / NEWEST).iterdir()):
        kinds[re.sub(r"\d+", "N", file.name)].append(file.name)
    return dict(kinds)


def judge(checkpoints: Path, name: str) -> str:
    """What is wrong with how a damaged `name` was met; empty if nothing is."""
    try:
        found = find_checkpoint(open_place(checkpoints), "auto")
    except UserError as error:
        return f"refused: {error}"
    if found is None or found.name != OLDER:
        return f"took {found and found.name}"
    if not any(NEWEST in reason and name in reason for reason in found.reasons):
        return f"did not name {name}: {found.reasons}"
    return ""


def judge_command(zygote: Zygote, folder: Path, recipe: Path, run: Path, name: str) -> str:
    """The same for the command: it goes on from the older checkpoint and tells why."""
    argv = ["train", "--from-file", str(recipe), "--run", str(run)]
    before = len(events_of(run))
    process = zygote.start(argv, cwd=folder, output=folder / "out")
    code = process.wait()
    events = events_of(run)[before:]
    resumed = [event["resumed_from"] for event in events if event["kind"] == "start"]
    told = [e["message"] for e in events if e["kind"] == "warning" and name in e["message"]]
    if code != 0 or resumed != [STEPS[-2]] or not told:
        return f"exit {code}, resumed from {resumed}, told {told}: {process.output()[-800:]}"
    return ""


def trials(number: int = 240) -> tuple[list[str], list[str]]:
    """All trials; the table, and what was wrong."""
    draw = random.Random(0)
    wrong: list[str] = []
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    commands = 0
    with tempfile.TemporaryDirectory(prefix="corruption-") as base, Zygote() as zygote:
        recipe, run = make_run(zygote, Path(base))
        kinds = kinds_of(run)
        plan = [(kind, damage) for kind in kinds for damage in DAMAGES]
        for index in range(max(number, len(plan))):
            kind, damage = plan[index % len(plan)]
            name = draw.choice(kinds[kind])
            copy = Path(base, "copy")
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(run, copy)
            checkpoints = copy / "checkpoints"
            older = checkpoints / OLDER / name
            DAMAGES[damage](checkpoints / NEWEST / name, older, draw)
            if damage == "the file of another step" and _same(run, name):
                continue  # to exchange what every step has alike is no damage
            counts[kind, damage] += 1
            problem = judge(checkpoints, name)
            if not problem and index % COMMAND_EVERY == 0:
                commands += 1
                problem = judge_command(zygote, Path(base), recipe, copy, name)
            if problem:
                wrong.append(f"{damage}, {name}: {problem}")
    lines = ["| kind of file | " + " | ".join(DAMAGES) + " |", "|---" * (len(DAMAGES) + 1) + "|"]
    for kind in kinds:
        lines.append(f"| `{kind}` | " + " | ".join(str(counts[kind, d]) for d in DAMAGES) + " |")
    total = sum(counts.values())
    told = f"{total} trials, {commands} of them through `armillary train`; {len(wrong)} wrong."
    lines += ["", told]
    return lines, wrong


def _same(run: Path, name: str) -> bool:
    newest, older = (run / "checkpoints" / step / name for step in (NEWEST, OLDER))
    return newest.read_bytes() == older.read_bytes()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=240)
    lines, wrong = trials(parser.parse_args().trials)
    print(*lines, *wrong, sep="\n")
    sys.exit(1 if wrong else 0)
