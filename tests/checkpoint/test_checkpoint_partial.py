"""Loading what fits, where that was asked for."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

from armillary.checkpoint.ranks import Ranks
from armillary.checkpoint.state import gather_state, restore_training
from armillary.checkpoint.store import CheckpointStore
from armillary.foundation.errors import UserError
from ranks import run_ranks

SPLIT = 6


def build(width: int, seed: int, bias: bool = True) -> tuple[nn.Module, AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(5, SPLIT), nn.Linear(SPLIT, 4, bias=bias), nn.Linear(4, width)
    )
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
    return model, AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: AdamW) -> None:
    model(torch.arange(5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def save_trained(folder: Path) -> None:
    model, optimizer = build(7, seed=1)
    step(model, optimizer)
    step(model, optimizer)
    with CheckpointStore(folder) as store:
        store.save(2, gather_state(model, [optimizer]), {})
        store.wait(raise_failure=True)


def load_into_another(folder: Path) -> tuple[list[str], dict[str, list[float]], set[str]]:
    """What differs, the whole tensors afterwards, and whose optimizer state is there."""
    model, optimizer = build(9, seed=2, bias=False)
    with CheckpointStore(folder) as store, closing(Ranks()):
        found = store.find("auto")
        assert found is not None
        with pytest.raises(UserError, match=r"other shapes: model.2.weight"):
            restore_training(store, found, model, [optimizer])
        differences = store.restore_what_fits(found, model, [optimizer])
    state = gather_state(model, [optimizer])
    whole = {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).flatten().tolist()
        for part in state.values()
        for name, t in part.items()
    }
    held = {name.rpartition(".")[0] for name in state["optimizer"]}
    step(model, optimizer)  # what was left out begins as if it were new
    return differences.lines(), whole, held


def trained() -> dict[str, list[float]]:
    model, optimizer = build(7, seed=1)
    step(model, optimizer)
    step(model, optimizer)
    state = gather_state(model, [optimizer])
    return {name: t.flatten().tolist() for part in state.values() for name, t in part.items()}


def test_what_fits_is_loaded_and_the_rest_is_named_and_begins_anew(tmp_path: Path) -> None:
    save_trained(tmp_path)
    expected, fresh = trained(), build(9, seed=2, bias=False)[0].state_dict()
    alone, together = load_into_another(tmp_path), run_ranks(load_into_another, 2, tmp_path)
    for lines, whole, held in (alone, *together):
        assert held == {"0.weight", "1.weight"}
        for name in ("0.weight", "1.weight", "0.weight.exp_avg", "1.weight.step"):
            assert whole[name] == expected[name], name
        for name in ("2.weight", "2.bias"):
            assert whole[name] == fresh[name].flatten().tolist(), name
        text = "\n".join(lines)
        assert "no place for: model.1.bias" in text
        assert "model.2.weight (checkpoint [7, 4], model [9, 4])" in text
        assert "0.weight" not in text
