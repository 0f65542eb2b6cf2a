"""The gradient norm is the norm of all gradients, the same on every mesh."""

import math
import os

import pytest
import torch
from optim_toy import Toy, backward, rows_of, shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from armillary.optim.clipping import clip_by_global_norm, gradient_norm
from ranks import run_ranks


def with_gradients(*gradients: torch.Tensor) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    return parameters


def reference(max_norm: float) -> tuple[float, list[torch.Tensor]]:
    model = Toy()
    backward(model, slice(None))
    exact = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
    clip_by_global_norm(model.parameters(), max_norm)
    return exact, [p.grad for p in model.parameters()]


def clipped_on_a_mesh(replicate: int, shards: int, max_norm: float):
    rank, world = int(os.environ["RANK"]), replicate * shards
    model = Toy()
    shard(model, replicate, shards)
    backward(model, rows_of(rank, world))
    norm = clip_by_global_norm(model.parameters(), max_norm)
    return norm.item(), [p.grad.full_tensor() for p in model.parameters()]


@pytest.mark.parametrize(("replicate", "shards"), [(1, 2), (1, 4), (2, 2)], ids=str)
def test_norm_and_clipped_gradients_are_those_of_one_process(replicate: int, shards: int) -> None:
    max_norm = 3.0
    exact, gradients = reference(max_norm)
    assert exact > max_norm
    for norm, sharded in run_ranks(clipped_on_a_mesh, replicate * shards, replicate, shards, 3.0):
        assert norm == pytest.approx(exact, rel=1e-6)
        for mine, expected in zip(sharded, gradients, strict=True):
            assert torch.allclose(mine, expected, rtol=1e-5, atol=1e-7)


def mixed_placements() -> tuple[float, list[torch.Tensor]]:
    """Sharded, replicated, partial, strided and plain gradients beside each other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    values = [torch.arange(1.0, 13.0).reshape(6, 2) * (i + 1) for i in range(5)]
    placements = [
        (Replicate(), Replicate()),
        (Replicate(), Shard(0)),
        (Shard(0), Shard(1)),
        (Shard(0), Shard(0)),
    ]
    gradients: list[torch.Tensor] = [
        distribute_tensor(value, mesh, placement)
        for value, placement in zip(values, placements, strict=False)
    ]
    gradients.append(DTensor.from_local(values[4] / 4, mesh, (Partial(), Partial())))
    gradients.append(values[0])
    parameters = with_gradients(*gradients)
    norm = gradient_norm(parameters)
    return norm.item(), [
        p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in parameters
    ]


def test_every_element_counts_once_whatever_its_placement() -> None:
    for norm, gradients in run_ranks(mixed_placements, 4):
        exact = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        assert norm == pytest.approx(exact, rel=1e-6)


def test_gradients_within_the_limit_keep_their_bits() -> None:
    gradient = torch.randn(64, generator=torch.Generator().manual_seed(0))
    parameters = with_gradients(gradient)
    for limit in (float(gradient.double().norm()) * 1.0001, math.inf):
        assert clip_by_global_norm(parameters, limit) == gradient_norm(parameters)
        assert torch.equal(parameters[0].grad, gradient)


def test_clipping_scales_to_the_limit_and_returns_the_norm_before() -> None:
    parameters = with_gradients(torch.full((3,), 2.0), torch.full((2, 2), -1.0))
    assert clip_by_global_norm(parameters, 1.0).item() == 4.0
    assert [p.grad.flatten()[0].item() for p in parameters] == [0.5, -0.25]


def test_bfloat16_gradients_are_measured_in_float32() -> None:
    (parameter,) = with_gradients(torch.full((4096,), 1.0, dtype=torch.bfloat16))
    norm = gradient_norm([parameter])
    assert norm.dtype == torch.float32
    assert norm.item() == 64.0


def test_missing_gradients_count_as_zero_and_tied_ones_once() -> None:
    (parameter,) = with_gradients(torch.tensor([3.0, 4.0]))
    assert gradient_norm([parameter, nn.Parameter(torch.ones(2)), parameter]).item() == 5.0
    assert gradient_norm([]).item() == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(bad: float) -> None:
    parameters = with_gradients(torch.tensor([1.0, bad]), torch.ones(3))
    assert not math.isfinite(clip_by_global_norm(parameters, 1.0).item())
