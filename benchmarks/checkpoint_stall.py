"""How long training stands still for a checkpoint: saved in the background, and at once.

    python benchmarks/checkpoint_stall.py [--recipe debug] [--saves 10] [--json FILE]

One run, whose saves are of either kind in turn. Still: all of the time between the end of a step
and the beginning of the next that goes into the save, and what the update after it waits for.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from armillary.checkpoint.store import CheckpointStore
from armillary.recipe import get
from armillary.recipe.recipe import Recipe
from armillary.training.session import Session
from armillary.training.train import train

_STEPS_BETWEEN = 5
_WARM_UP_SAVES = 2  # of each kind


def main() -> int:
    """Parses the command line, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="debug")
    parser.add_argument("--saves", type=int, default=10, help="of each kind")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    stalls = measure(get(arguments.recipe), arguments.saves)
    at_once, background = (statistics.median(stalls[kind]) for kind in (False, True))
    report = {
        "recipe": arguments.recipe,
        "synchronous_seconds": stalls[False],
        "asynchronous_seconds": stalls[True],
        "ratio": background / at_once,
    }
    print(
        f"{arguments.recipe}: training stands still for {1e3 * at_once:.1f} ms at once,"
        f" {1e3 * background:.2f} ms in the background: {100 * background / at_once:.1f} %"
        f" (medians of {arguments.saves})"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def measure(recipe: Recipe, saves: int) -> dict[bool, list[float]]:
    """Seconds of each stall, by whether the save was asynchronous."""
    total = 2 * (saves + _WARM_UP_SAVES)
    recipe = dataclasses.replace(
        recipe,
        checkpoint=dataclasses.replace(recipe.checkpoint, every=_STEPS_BETWEEN, keep_last=1),
        budget=dataclasses.replace(recipe.budget, steps=_STEPS_BETWEEN * total + 1),
    )
    watch = _Watch()
    save, wait = Session.save, CheckpointStore.wait_until_staged

    def save_of_either_kind(session: Session, **options: Any) -> None:
        session._store.wait()  # the one before has had five steps of time, and is not measured
        watch.begin()
        session._store.config = dataclasses.replace(
            session._store.config, asynchronous=watch.asynchronous
        )
        watch.add(lambda: save(session, **options))

    def timed_wait(store: CheckpointStore) -> None:
        watch.add(lambda: wait(store))

    Session.save = save_of_either_kind  # type: ignore[method-assign]
    CheckpointStore.wait_until_staged = timed_wait  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        train(recipe, name="stall", folder=Path(folder, "run"))
    return {kind: watch.stalls[kind][_WARM_UP_SAVES:][:saves] for kind in (False, True)}


class _Watch:
    """Adds up what belongs to one save."""

    def __init__(self) -> None:
        self.stalls: dict[bool, list[float]] = {False: [], True: []}
        self.asynchronous = True

    def begin(self) -> None:
        """Another save, of the other kind."""
        self.asynchronous = not self.asynchronous
        self.stalls[self.asynchronous].append(0.0)

    def add(self, work: Callable[[], None]) -> None:
        """Does something that training waits for."""
        began = time.perf_counter()
        work()
        if self.stalls[self.asynchronous]:
            self.stalls[self.asynchronous][-1] += time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(main())
