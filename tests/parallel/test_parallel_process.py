"""This process among the ranks, with and without others; the mesh that they form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from armillary.foundation.errors import UserError
from armillary.parallel import Parallel, process
from armillary.parallel.mesh import Mesh
from ranks import run_ranks

CPU = torch.device("cpu")


def answers() -> dict[str, Any]:
    return {
        "rank": process.rank(),
        "main": process.is_main(),
        "size": process.world_size(),
        "group made": process.init_process_group(process.choose_device("cpu")),
    }


def meshes() -> list[tuple[dict[str, int], int, int, float, int]]:
    found = []
    for parallel in (Parallel(), Parallel(dp_replicate=2), Parallel(dp_replicate=-1, dp_shard=1)):
        mesh = Mesh.create(parallel, CPU)
        own = torch.tensor(float(mesh.data_rank + 1))
        total = mesh.sum_over_data(own).item()
        assert own == mesh.data_rank + 1
        count = mesh.sum_over_data(torch.tensor([2**40])).item()
        found.append((mesh.axes, mesh.data_rank, mesh.data_size, total, int(count)))
    return found


def test_one_process_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert answers() == {
        "rank": 0,
        "main": True,
        "size": 1,
        "group made": False,
    }
    process.destroy()
    mesh = Mesh.create(Parallel(), CPU)
    assert (mesh.axes, mesh.data_rank, mesh.data_size) == ({"dp_replicate": 1, "dp_shard": 1}, 0, 1)
    assert mesh.is_main and mesh.device_mesh is None
    assert mesh.sum_over_data(torch.tensor(3.0)) == 3.0


def test_ranks_know_their_place() -> None:
    for rank, found in enumerate(run_ranks(answers, 2)):
        assert found == {
            "rank": rank,
            "main": rank == 0,
            "size": 2,
            "group made": False,
        }


def test_a_mesh_splits_the_batch_into_as_many_parts_as_ranks() -> None:
    axes = [
        {"dp_replicate": 1, "dp_shard": 4},
        {"dp_replicate": 2, "dp_shard": 2},
        {"dp_replicate": 4, "dp_shard": 1},
    ]
    for rank, found in enumerate(run_ranks(meshes, 4)):
        assert found == [(each, rank, 4, 10.0, 2**42) for each in axes]


def test_what_is_wrong_with_the_surroundings_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="dp_shard = 3 does not cover the ranks"):
        Mesh.create(Parallel(dp_shard=3), CPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="cuda is not available"):
        process.choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert process.choose_device() == torch.device("cuda", 0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):  # every rank sees it, also the one that would have a GPU
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(UserError, match=r"2 ranks here, but this machine has 1 GPU"):
            process.choose_device()
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UserError, match="MASTER_ADDR"):
        process.init_process_group(CPU)
