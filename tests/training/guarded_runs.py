"""Tiny runs with a step that would poison them, shared by the guard's tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from poisoned_task import Poisoned
from safetensors.torch import load_file

from armillary.checkpoint.config import Checkpoint
from armillary.parallel.config import Parallel
from armillary.recipe.recipe import Recipe
from armillary.resilience.guard_config import Guard, GuardPolicy
from armillary.training import steps
from armillary.training.train import train
from tiny_runs import accumulating, steps_of, tiny_recipe, write_corpus

STEPS, BAD = 9, 5
SEQUENCES = 16
"""Of a step of `tiny_recipe`."""


def recipe_in(folder: Path, ranks: int = 1) -> Recipe:
    """Accumulates, looks at held-out text on the way, and saves after every second step."""
    recipe = tiny_recipe(folder, steps=STEPS, parallel=Parallel(device="cpu", dp_shard=ranks))
    return replace(accumulating(recipe, 4), checkpoint=Checkpoint(every=2, keep_last=99))


def poisoned(recipe: Recipe, samples: tuple[int, ...], policy: GuardPolicy, **spike: Any) -> Recipe:
    guard = Guard(policy=policy, **{name: spike[name] for name in spike if name != "spike"})
    task = Poisoned(samples=samples, spike=spike.get("spike", 0.0))
    return replace(recipe, task=task, guard=guard)


def run(recipe: Recipe, folder: Path, resume: str = "auto") -> int:
    return train(recipe, name="tiny", folder=folder, resume=resume)


@contextmanager
def lagging() -> Iterator[None]:
    """As on a GPU: what a step measured is read when the next one has been enqueued."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "lag_of", lambda assembly: int(assembly.optimizers.can_skip))
        yield


def weights_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / f"step-{step:08d}"
    return {
        f"{path.name}:{name}": tensor
        for path in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def saved_steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


def measured(run: Path) -> list[tuple[int, list[int], float | None]]:
    return [(step["step"], step["samples"], step["loss"]) for step in steps_of(run)]


def saving_every_step(path: Path) -> tuple[Recipe, tuple[int, ...]]:
    write_corpus(path)
    recipe = replace(recipe_in(path), checkpoint=Checkpoint(every=1, keep_last=99))
    assert run(recipe, path / "whole") == 0
    return recipe, tuple(steps_of(path / "whole")[BAD - 1]["sample_ids"][:1])
