"""An update that the device leaves out changes nothing, whatever the gradients."""

from __future__ import annotations

import math

import pytest
import torch
from optim_toy import Toy, backward, shard
from torch import Tensor

from armillary.checkpoint.state import gather_state
from armillary.optim.adamw import AdamW
from armillary.optim.config import OptimizerConfig
from armillary.optim.muon import Muon
from armillary.optim.optimizers import Optimizers
from armillary.optim.skipping import can_skip
from armillary.parallel.layout import local_tensor
from armillary.parallel.model import ParallelModel
from ranks import run_ranks

CONFIGS = (AdamW(), Muon())
SKIP, STEP = torch.tensor(True), torch.tensor(False)
ALL = slice(None)


def state_of(model: Toy | ParallelModel, optimizers: Optimizers) -> dict[str, Tensor]:
    found = gather_state(model, optimizers.optimizers)
    return {
        f"{kind}.{name}": local_tensor(tensor).clone()
        for kind, tensors in found.items()
        for name, tensor in tensors.items()
    }


def poison(model: Toy | ParallelModel) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        local = local_tensor(parameter.grad)
        local.view(-1)[: local.numel() // 2] = math.nan


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def steps_with_one_left_out(model: Toy | ParallelModel, config: OptimizerConfig) -> None:
    """Asserts that nothing is left of the one, and returns what the others made."""
    optimizers = config.build(model)
    assert optimizers.can_skip
    for step in range(2):
        backward(model, ALL, seed=step)
        optimizers.step(STEP)
        optimizers.zero_grad()
    before = state_of(model, optimizers)
    backward(model, ALL, seed=9)
    poison(model)
    optimizers.step(SKIP)
    assert same(before, state_of(model, optimizers)), "a skipped update has left something"
    optimizers.zero_grad()
    backward(model, ALL, seed=2)
    optimizers.step(STEP)
    after = state_of(model, optimizers)
    assert not same(before, after)
    assert all(tensor.isfinite().all() for tensor in after.values())


@pytest.mark.parametrize("config", CONFIGS, ids=["adamw", "muon"])
def test_a_run_with_an_update_left_out_is_one_that_never_had_it(config: OptimizerConfig) -> None:
    skipping, plain = Toy(), Toy()
    steps_with_one_left_out(skipping, config)
    optimizers = config.build(plain)
    for step in range(3):
        backward(plain, ALL, seed=step)
        optimizers.step()  # as without a guard
        optimizers.zero_grad()
    assert same(dict(skipping.named_parameters()), dict(plain.named_parameters())), (
        "masking an update that counts has changed it"
    )


def skip_sharded() -> None:
    for config in CONFIGS:
        steps_with_one_left_out(shard(Toy(), 1), config)


def test_nothing_is_left_of_a_skipped_update_on_sharded_parameters() -> None:
    run_ranks(skip_sharded, 2)


def test_the_first_update_can_be_left_out_too() -> None:
    for config in CONFIGS:
        model = Toy()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizers = config.build(model)
        backward(model, ALL, seed=0)
        poison(model)
        optimizers.step(SKIP)
        assert all(map(torch.equal, before, model.parameters()))


def test_the_protocol_is_the_one_of_torch_2_11_to_2_13() -> None:
    """`found_inf` is how torch's own GradScaler asks; see `optim.skipping`."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert (2, 11) <= version <= (2, 13), f"look whether torch {version} still has it"
    weight = torch.nn.Parameter(torch.ones(3))
    assert can_skip(torch.optim.AdamW([weight], fused=True))
    assert not can_skip(torch.optim.AdamW([weight], fused=False))
    assert not can_skip(torch.optim.SGD([weight]))
