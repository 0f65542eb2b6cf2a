"""One answer on every mesh: the whole trainer, against one process."""

from __future__ import annotations

import hashlib
from contextlib import closing
from pathlib import Path

import pytest
import torch

from armillary.checkpoint.ranks import Ranks
from armillary.foundation.progress import NoProgress
from armillary.parallel.config import Parallel
from armillary.parallel.mesh import Mesh
from armillary.training.assembly import assemble, open_data
from armillary.training.train import train
from ranks import run_ranks
from tiny_runs import accumulating, events_of, steps_of, tiny_recipe, write_corpus

STEPS = 10
RELATIVE = 1e-5

MESHES = {
    1: {"alone": Parallel()},
    2: {
        "ddp-2": Parallel(dp_replicate=2, dp_shard=1),
        "fsdp-2": Parallel(dp_shard=2),
        "fsdp-2-lazy": Parallel(dp_shard=2, sync_every_microbatch=False),
    },
    4: {
        "fsdp-4": Parallel(dp_shard=4),
        "hsdp-2x2": Parallel(dp_replicate=2, dp_shard=2),
        "tp-2-fsdp-2": Parallel(tp=2),
    },
}
SEQUENCES = 16
ACCUMULATIONS = {"whole": 1, "accumulated": 4}


def initial_digests(folder: str, parallel: Parallel) -> dict[str, str]:
    """SHA-256 of every initial weight, whole, as rank 0 sees it."""
    recipe = tiny_recipe(Path(folder), steps=STEPS, parallel=parallel)
    mesh = Mesh.create(recipe.parallel, torch.device("cpu"))
    with closing(Ranks()) as ranks:
        data = open_data(recipe, NoProgress(), ranks)
    model = assemble(recipe, mesh, data).model
    return {
        name: hashlib.sha256(model.gather(name, p.detach()).numpy().tobytes()).hexdigest()
        for name, p in model.named_parameters()
    }


def train_all(folder: str, world_size: int) -> dict[str, dict[str, str]]:
    """Trains every mesh of this world size, each with and without accumulation."""
    torch.set_num_threads(1)
    digests = {}
    for name, parallel in MESHES[world_size].items():
        for split, accumulation in ACCUMULATIONS.items():
            recipe = tiny_recipe(Path(folder), steps=STEPS, parallel=parallel)
            data_size = world_size // parallel.tp
            recipe = accumulating(recipe, SEQUENCES // data_size // accumulation)
            run = Path(folder) / f"{name}-{split}"
            assert train(recipe, name="tiny", folder=run) == 0
        digests[name] = initial_digests(folder, parallel)
    return digests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mesh")
    write_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def digests(folder: Path) -> dict[str, dict[str, str]]:
    """Trains everything once; the initial weights of each mesh."""
    found: dict[str, dict[str, str]] = {}
    for world_size in MESHES:
        found |= run_ranks(train_all, world_size, str(folder), world_size)[0]
    return found


def test_initial_weights_are_bitwise_equal_on_every_mesh(
    digests: dict[str, dict[str, str]],
) -> None:
    assert len(digests) == 7
    for name, weights in digests.items():
        assert weights == digests["alone"], name


CASES = [
    f"{name}-{split}" for names in MESHES.values() for name in names for split in ACCUMULATIONS
]


@pytest.mark.parametrize("case", [case for case in CASES if case != "alone-whole"])
def test_loss_gradient_norm_tokens_and_rates_do_not_depend_on_the_mesh(
    case: str, folder: Path, digests: dict[str, dict[str, str]]
) -> None:
    oracle, found = steps_of(folder / "alone-whole"), steps_of(folder / case)
    assert [step["step"] for step in found] == list(range(1, STEPS + 1))
    assert len({step["tokens"] for step in oracle}) > 1, "the masks are not ragged"
    for mine, theirs in zip(found, oracle, strict=True):
        for name in ("step", "tokens", "tokens_total", "samples", "sample_ids", "learning_rate"):
            assert mine[name] == theirs[name], name
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=RELATIVE)
        assert mine["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=RELATIVE)


@pytest.mark.parametrize("case", [case for case in CASES if case != "alone-whole"])
def test_validation_does_not_depend_on_the_mesh(
    case: str, folder: Path, digests: dict[str, dict[str, str]]
) -> None:
    oracle, found = (events_of(folder / run, "validation") for run in ("alone-whole", case))
    assert [event["step"] for event in found] == [7, 10]
    for mine, theirs in zip(found, oracle, strict=True):
        assert mine["tokens"] == theirs["tokens"]
        assert mine["bits_per_byte"] == pytest.approx(theirs["bits_per_byte"], rel=RELATIVE)
