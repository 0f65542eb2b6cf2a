"""Checkpoints written by some number of ranks and read by another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from armillary.checkpoint.config import Checkpoint
from armillary.checkpoint.find import find_checkpoint
from armillary.checkpoint.places.local import LocalPlace
from armillary.checkpoint.state import gather_state, restore_model, restore_training
from armillary.checkpoint.store import CheckpointStore
from armillary.foundation.errors import RunError
from ranks import run_ranks

_VOCABULARY = 7  # divides by no number of ranks used here
Full = dict[str, list[Any]]


def build(seed: int, replicas: int = 1) -> tuple[nn.Module, AdamW]:
    """A sharded model, where there is a group, and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(_VOCABULARY, 3), nn.Linear(3, 5), nn.Linear(5, _VOCABULARY))
    if dist.is_initialized():
        shards = dist.get_world_size() // replicas
        mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
        for module in (*model, model):
            fully_shard(module, mesh=mesh if replicas > 1 else mesh["shard"])
    return model, AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: AdamW) -> None:
    tokens = torch.arange(_VOCABULARY)
    nn.functional.cross_entropy(model(tokens), tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def full(model: nn.Module, optimizer: AdamW) -> Full:
    """Every tensor, whole, as numbers."""
    state = gather_state(model, [optimizer])
    return {
        f"{part}.{name}": whole(tensor).tolist()
        for part, tensors in state.items()
        for name, tensor in tensors.items()
    }


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train_and_save(folder: Path) -> Full:
    model, optimizer = build(1)
    events: list[tuple[str, dict[str, Any]]] = []
    rank = dist.get_rank() if dist.is_initialized() else 0
    with CheckpointStore(folder, on_event=lambda *event: events.append(event)) as store:
        for _ in range(3):
            step(model, optimizer)
        saved = full(model, optimizer)
        store.save(3, gather_state(model, [optimizer]), {"tokens_total": 21}, f"r{rank}".encode())
        store.wait_until_staged()
        step(model, optimizer)  # the staged copy does not follow
        store.wait(raise_failure=True)
    states = [fields["state"] for _, fields in events]
    assert states == (["staged", "durable"] if rank == 0 else [])
    return saved


def resume_and_save(source: Path, target: Path | None, replicas: int = 1) -> tuple[Full, Any]:
    """Reads from `source` whatever wrote it; writes the same state to `target`."""
    model, optimizer = build(2, replicas)
    with CheckpointStore(source) as store:
        found = store.find("auto")
        assert found is not None
        _, rng = restore_training(store, found, model, [optimizer])
    alone, _ = build(3, replicas)
    restore_model(found, alone)
    for name, tensor in gather_state(alone)["model"].items():
        assert torch.equal(whole(tensor), whole(gather_state(model)["model"][name])), name
    if target is not None:
        with CheckpointStore(target, Checkpoint(asynchronous=False)) as store:
            store.save(3, gather_state(model, [optimizer]), {"tokens_total": 21}, b"again")
    return full(model, optimizer), rng


def test_a_checkpoint_moves_between_4_2_and_1_ranks_and_back_bit_for_bit(tmp_path: Path) -> None:
    four, two, one = (tmp_path / name for name in ("four", "two", "one"))
    saved = run_ranks(train_and_save, 4, four)[0]
    assert saved["optimizer.0.weight.step"] == 3
    on_two = run_ranks(resume_and_save, 2, four, two)
    assert on_two == [(saved, b"r0"), (saved, b"r1")]
    assert resume_and_save(two, one) == (saved, b"again")
    on_four = run_ranks(resume_and_save, 4, one, None, replicas=2)
    assert on_four == [(saved, b"again"), *[(saved, None)] * 3]
    files = json.loads((four / "step-00000003" / "manifest.json").read_text())["files"]
    assert {f"rng-0000{rank}.json" for rank in range(4)} < files.keys()


def fail_on_rank_1(folder: Path) -> list[str]:
    """Each stage that all ranks take part in fails on one of them; returns what all ranks heard."""
    failing = ""

    def fail(stage: str) -> None:
        if stage == failing and dist.get_rank() == 1:
            raise OSError(28, "No space left on device")

    model, optimizer = build(1)
    heard = []
    with CheckpointStore(folder, on_stage=fail) as store:
        store.save(1, gather_state(model, [optimizer]), {})
        store.wait()
        for number, stage in enumerate(("tensors", "rng"), start=2):
            failing = stage
            store.save(number, gather_state(model, [optimizer]), {})
            try:
                store.wait(raise_failure=True, retry_seconds=0)
            except RunError as error:
                heard.append(str(error))
        failing = ""
        store.save(9, gather_state(model, [optimizer]), {})
        store.wait(raise_failure=True)
        found = store.find("auto")
        assert found is not None and found.step == 9
    return heard


def test_what_fails_on_one_rank_fails_on_all_and_the_next_save_works(tmp_path: Path) -> None:
    first, second = run_ranks(fail_on_rank_1, 2, tmp_path)
    assert first == second and len(first) == 2
    assert all("rank 1: OSError: [Errno 28] No space left on device" in text for text in first)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000001", "step-00000009"]
    assert find_checkpoint(LocalPlace(tmp_path), "1") is not None
