"""Checkpoints cross meshes: what one wrote, any other reads, and training goes on as if nothing
had happened, with the very next sample.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from armillary.parallel.config import Parallel
from armillary.recipe.recipe import Recipe
from armillary.training.train import train
from invariance.recipes import base
from ranks import run_ranks
from tiny_runs import events_of, write_corpus

SAVED_AT = 4
STEPS = 8
LIMIT = 1e-6
"""Relative deviation of the losses after the crossing."""

MESHES = {
    "fsdp4": Parallel(dp_shard=4),
    "tp2-fsdp2": Parallel(tp=2, dp_shard=2),
    "pp2-fsdp2": Parallel(pp=2, dp_shard=2),
    "cp2-fsdp2": Parallel(cp=2, dp_shard=2),
    "ep2-fsdp2": Parallel(dp_shard=4, ep=2),
    "pp2-tp2-fsdp2": Parallel(pp=2, tp=2, dp_shard=2),
}
WORLDS = {
    world: [name for name, mesh in MESHES.items() if mesh.grid.world_size == world]
    for world in (4, 8)
}
ALWAYS = [("ep2-fsdp2", "pp2-tp2-fsdp2"), ("pp2-tp2-fsdp2", "cp2-fsdp2")]
"""Crossings that are tried without --full too."""


def _recipe(folder: Path, mesh: str | None, steps: int) -> Recipe:
    """A mixture of experts, so that every mesh cuts something; two microbatches a step."""
    recipe = base(folder, "moe")
    return replace(
        recipe,
        budget=replace(recipe.budget, steps=steps, microbatch_sequences=2 if mesh else 0),
        # the schedule looks at the whole budget, so the run that saves has it too and is stopped
        parallel=replace(MESHES[mesh] if mesh else Parallel(dp_shard=1), device="cpu"),
        checkpoint=replace(recipe.checkpoint, every=SAVED_AT, keep_last=10),
        validation=replace(recipe.validation, final_sequences=2),
    )


def save_all(folder: str, names: list[str]) -> None:
    """Whole runs, each with a checkpoint half way."""
    torch.set_num_threads(1)
    for name in names:
        recipe = _recipe(Path(folder), name, STEPS)
        assert train(recipe, name=name, folder=Path(folder) / name) == 0


def cross_all(folder: str, pairs: list[tuple[str, str]]) -> None:
    """Runs that go on, on their own mesh, from the half-way checkpoint of another."""
    torch.set_num_threads(1)
    for source, target in pairs:
        recipe = _recipe(Path(folder), target, STEPS)
        saved = Path(folder) / source / "checkpoints" / f"step-{SAVED_AT:08d}"
        run = Path(folder) / f"{source}-to-{target}"
        assert train(recipe, name="crossing", folder=run, resume=str(saved)) == 0


def save_alone(folder: str) -> None:
    """The oracle: one process from the first step to the last."""
    torch.set_num_threads(1)
    recipe = _recipe(Path(folder), None, STEPS)
    assert train(recipe, name="alone", folder=Path(folder) / "alone") == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """All runs that the selected tests look at, few ranks started for many of them."""
    folder = tmp_path_factory.mktemp("crossing")
    write_corpus(folder, documents=400)
    pairs = [
        (item.callspec.params["source"], item.callspec.params["target"])
        for item in request.session.items
        if item.path == Path(__file__) and hasattr(item, "callspec")
    ]
    run_ranks(save_alone, 1, str(folder))
    for world, names in WORLDS.items():
        wanted = [name for name in names if any(name == source for source, _ in pairs)]
        run_ranks(save_all, world, str(folder), wanted, timeout=60 * len(wanted) + 30)
    for world, names in WORLDS.items():
        wanted_pairs = [pair for pair in pairs if pair[1] in names]
        limit = 60 * len(wanted_pairs) + 30
        run_ranks(cross_all, world, str(folder), wanted_pairs, timeout=limit)
    return folder


def _pairs() -> list[Any]:
    return [
        pytest.param(a, b, marks=() if (a, b) in ALWAYS else pytest.mark.full, id=f"{a}-to-{b}")
        for a in MESHES
        for b in MESHES
        if a != b
    ]


@pytest.mark.parametrize(("source", "target"), _pairs())
def test_a_checkpoint_of_one_mesh_goes_on_on_another(
    source: str, target: str, folder: Path
) -> None:
    oracle = events_of(folder / "alone", "step")
    saved = events_of(folder / source, "step")
    crossed = events_of(folder / f"{source}-to-{target}", "step")
    assert [event["step"] for event in crossed] == list(range(SAVED_AT + 1, STEPS + 1))
    for expected, found in zip(oracle, saved[:SAVED_AT] + crossed, strict=True):
        for exact in ("samples", "sample_ids", "tokens", "tokens_total", "learning_rate"):
            assert found[exact] == expected[exact], exact
        assert found["loss"] == pytest.approx(expected["loss"], rel=LIMIT, abs=0)


def test_the_table_has_every_pair_of_six_meshes() -> None:
    assert len(_pairs()) == 30
