"""Model and optimizers as named tensors, and back, exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_examples import files_in
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import Optimizer

from armillary.checkpoint.find import find_checkpoint
from armillary.checkpoint.places.local import LocalPlace
from armillary.checkpoint.state import (
    gather_state,
    initialise_optimizers,
    restore_model,
    restore_training,
)
from armillary.checkpoint.store import CheckpointStore
from armillary.checkpoint.tensors import flatten
from armillary.foundation.errors import UserError


class Tiny(nn.Module):
    """An embedding tied to the head, two matrices, a norm and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.layers = nn.ModuleDict({"0": nn.Linear(6, 6), "1": nn.Linear(6, 6, bias=False)})
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers.values():
            hidden = hidden + layer(hidden).tanh()
        out: Tensor = self.head(self.norm(hidden))
        return out


class Counting(Optimizer):
    """Keeps its counter as a python number, as some optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
                p.sub_(p.grad, alpha=group["lr"] / self.state[p]["steps"])


def build(seed: int, *, muon: bool = True) -> tuple[Tiny, list[Optimizer]]:
    torch.manual_seed(seed)
    model = Tiny()
    matrices = [layer.weight for layer in model.layers.values()]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    if not muon:
        return model, [torch.optim.AdamW(model.parameters(), lr=0.1)]
    counted, rest = [model.norm.bias], [p for p in others if p is not model.norm.bias]
    groups = [{"params": rest[:2], "weight_decay": 0.1}, {"params": rest[2:], "weight_decay": 0.0}]
    return model, [
        torch.optim.Muon(matrices, lr=0.1),
        torch.optim.AdamW(groups, lr=0.1),
        Counting(counted),
    ]


def train(model: nn.Module, optimizers: list[Optimizer], steps: range) -> list[float]:
    losses = []
    for step in steps:
        tokens = torch.arange(step, step + 5) % 7
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(-1))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name


def test_training_goes_on_bit_for_bit_and_a_second_save_writes_the_same_bytes(
    tmp_path: Path,
) -> None:
    model, optimizers = build(1)
    train(model, optimizers, range(3))
    with CheckpointStore(tmp_path / "a") as store:
        store.save(3, gather_state(model, optimizers), {"tokens_total": 15})
        store.wait_until_staged()
        expected = train(model, optimizers, range(3, 8))

        other, fresh = build(2)
        found = store.find()
        assert found is not None
        scalars, _ = restore_training(store, found, other, fresh)
    assert scalars == {"tokens_total": 15}
    steps = [state["step"] for state in fresh[1].state.values()]
    assert steps and all(step.item() == 3 for step in steps)
    assert fresh[2].state[other.norm.bias] == {"steps": 3}
    assert all(p.grad is None for p in other.parameters())
    assert all(group["lr"] == 0.1 for optimizer in fresh for group in optimizer.param_groups)
    assert other.head.weight is other.embedding.weight
    with CheckpointStore(tmp_path / "b") as again:
        again.save(3, gather_state(other, fresh), scalars)
    for name in files_in(tmp_path / "a" / "step-00000003"):
        if name != "manifest.json":
            first, second = (tmp_path / side / "step-00000003" / name for side in "ab")
            assert first.read_bytes() == second.read_bytes()
    assert train(other, fresh, range(3, 8)) == expected
    assert_equal(flatten(gather_state(other, fresh)), flatten(gather_state(model, optimizers)))


def test_names_are_those_of_the_plain_model_whatever_wraps_it() -> None:
    plain, _ = build(1)
    wrapped, _ = build(1)
    wrapped.layers["0"] = checkpoint_wrapper(wrapped.layers["0"])
    wrapped.layers["1"].compile(backend="eager")
    names = list(gather_state(plain)["model"])
    assert names == list(gather_state(wrapped)["model"])
    assert names == [
        "count",
        "embedding.weight",
        "layers.0.weight",
        "layers.0.bias",
        "layers.1.weight",
        "norm.weight",
        "norm.bias",
    ]
    optimizer = torch.optim.AdamW(wrapped.parameters())
    initialise_optimizers([optimizer])
    assert "layers.0.weight.exp_avg" in gather_state(wrapped, [optimizer])["optimizer"]


def test_state_of_what_was_never_stepped_is_absent_before_and_after(tmp_path: Path) -> None:
    model, optimizers = build(1, muon=False)
    other, fresh = build(2, muon=False)
    with CheckpointStore(tmp_path) as store:
        store.save(0, gather_state(model, optimizers), {})
        found = store.find()
        assert found is not None
        restore_training(store, found, other, fresh)
        assert not fresh[0].state
        assert_equal(gather_state(other)["model"], gather_state(model)["model"])
        model.norm(torch.ones(6)).sum().backward()
        optimizers[0].step()
        store.save(1, gather_state(model, optimizers), {})
        found = store.find()
        assert found is not None
        restore_training(store, found, other, fresh)
    assert set(fresh[0].state) == {other.norm.weight, other.norm.bias}


def test_another_optimizer_or_model_is_refused_by_name(tmp_path: Path) -> None:
    model, optimizers = build(1, muon=False)
    train(model, optimizers, range(2))
    with CheckpointStore(tmp_path) as store:
        store.save(2, gather_state(model, optimizers), {})
        found = store.find()
        assert found is not None
        other, others = build(2)
        before = flatten(gather_state(other))
        before = {name: tensor.clone() for name, tensor in before.items()}
        with pytest.raises(UserError) as error:
            restore_training(store, found, other, others)
        assert (
            "lacks tensors that this recipe needs: optimizer.layers.0.weight.momentum_buffer"
            in (str(error.value))
        )
        assert "no place for: optimizer.layers.0.weight" in str(error.value)
        assert_equal(flatten(gather_state(other)), before)


def test_weights_alone_can_be_loaded_without_optimizer_or_store(tmp_path: Path) -> None:
    model, optimizers = build(1)
    train(model, optimizers, range(2))
    with CheckpointStore(tmp_path / "run" / "checkpoints") as store:
        store.save(2, gather_state(model, optimizers), {})
    found = find_checkpoint(LocalPlace(tmp_path), str(tmp_path / "run"))
    assert found is not None
    other, _ = build(2)
    restore_model(found, other)
    assert_equal(gather_state(other)["model"], gather_state(model)["model"])
    other.head = nn.Linear(6, 7, bias=False)
    with pytest.raises(UserError, match=r"lacks tensors .*model.head.weight"):
        restore_model(found, other)
