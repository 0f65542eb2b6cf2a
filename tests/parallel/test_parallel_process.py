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


def test_ranks_know_their_place() -> None:
    for rank, found in enumerate(run_ranks(answers, 2)):
        assert found == {
            "rank": rank,
            "main": rank == 0,
            "size": 2,
            "group made": False,
        }


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
