"""First weights: a function of (seed, name, index in the whole parameter) and of nothing else."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_cases import full, tiny
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from armillary.models.layers.initializer import ONES, Initializer, truncated_normal
from armillary.parallel.blocks import tied_parameters
from armillary.parallel.materialise import allocate, materialise
from armillary.parallel.random_numbers import CHUNK, NormalStream
from ranks import run_ranks

CPU = torch.device("cpu")
SHAPES = {"row": (7,), "matrix": (5, 6), "wide": (2, CHUNK + 3), "cube": (3, 4, 5)}


class Odd(nn.Module):
    """Parameters of shapes that no number of ranks divides."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.empty(SHAPES[name], device="meta")))
        self.gain = nn.Parameter(torch.empty(3, device="meta"))

    def initializers(self) -> dict[str, Initializer]:
        return {name: truncated_normal(0.5) for name in SHAPES} | {"gain": ONES}


def whole(names: list[str], seed: int = 1) -> dict[str, torch.Tensor]:
    model = Odd(names)
    materialise(model, CPU, seed)
    return {name: full(parameter) for name, parameter in model.named_parameters()}


def spread(shape: tuple[int, ...], placements: list[Placement]) -> dict[str, torch.Tensor]:
    """The odd parameters, put together again from shards that each rank filled by itself."""
    mesh = init_device_mesh("cpu", shape)
    model = Odd(list(SHAPES))
    for name in SHAPES:
        parameter = model.get_parameter(name)
        fitting = [
            Replicate() if isinstance(each, Shard) and each.dim >= parameter.ndim else each
            for each in placements
        ]
        setattr(model, name, nn.Parameter(distribute_tensor(parameter.data, mesh, fitting)))
    materialise(model, CPU, 1)
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            storage = parameter.to_local().untyped_storage().nbytes()
            assert storage == parameter.to_local().numel() * 4
    return {name: full(parameter) for name, parameter in model.named_parameters()}


def spreads() -> list[dict[str, torch.Tensor]]:
    return [
        spread((4,), [Shard(0)]),
        spread((4,), [Shard(1)]),
        spread((2, 2), [Replicate(), Shard(0)]),
        spread((2, 2), [Shard(1), Shard(0)]),
        spread((2, 2), [Shard(2), Shard(2)]),
    ]


def test_shards_of_any_shape_are_parts_of_the_same_tensors() -> None:
    expected = whole(list(SHAPES))
    for rank in run_ranks(spreads, 4):
        for found in rank:
            assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_weights_depend_on_seed_and_name_but_on_no_other_parameter() -> None:
    first = whole(list(SHAPES))
    again = whole(list(reversed(SHAPES)))
    alone = whole(["cube"])
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert torch.equal(first["cube"], alone["cube"])
    assert not torch.equal(first["cube"], whole(["cube"], seed=2)["cube"])
    assert not torch.equal(first["matrix"].flatten()[:7], first["row"])
    assert torch.equal(first["gain"], torch.ones(3))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 3 * CHUNK), st.integers(0, 2 * CHUNK))
def test_a_stream_reads_the_same_numbers_wherever_it_starts(start: int, count: int) -> None:
    wanted = np.empty(start + count, np.float32)
    NormalStream(5, "name", std=1.0).read(0, wanted)
    part = np.empty(count, np.float32)
    stream = NormalStream(5, "name", std=1.0)
    stream.read(start, part)
    assert np.array_equal(part, wanted[start:])


def test_the_numbers_are_the_same_bits_on_every_machine_and_version() -> None:
    numbers = np.empty(4 * CHUNK, np.float32)
    NormalStream(7, "layers.0.attention.query.weight", std=0.02, cut=3.0).read(5, numbers)
    digest = hashlib.sha256(numbers.astype("<f4").tobytes()).hexdigest()
    assert digest == "26c9d2f09101ca8983358f790b081efc25994796b0e4e05cccce387f30528446"


@pytest.mark.parametrize("cut", [math.inf, 3.0, 1.0])
def test_numbers_are_normal_and_stay_within_the_cut(cut: float) -> None:
    numbers = np.empty(1 << 20, np.float32)
    NormalStream(0, "weight", std=2.0, cut=cut).read(0, numbers)
    drawn = torch.from_numpy(numbers).double() / 2.0
    assert drawn.abs().max() <= cut * (1 + 1e-6)
    # Mapped through the distribution they are uniform: a decile holds a tenth, within 5 sigma.
    limit = math.erf(cut / math.sqrt(2))
    uniform = (torch.erf(drawn / math.sqrt(2)) / limit + 1) / 2
    counts = torch.histc(uniform, bins=10, min=0, max=1)
    assert (counts - (1 << 20) / 10).abs().max() < 5 * math.sqrt((1 << 20) * 0.09)
    assert torch.corrcoef(torch.stack([drawn[1:], drawn[:-1]]))[0, 1].abs() < 5 / 1024


def test_tied_weights_are_one_parameter_again() -> None:
    with torch.device("meta"):
        model = tiny(tied=True).build()
    materialise(model, CPU, 0)
    assert model.head.weight is model.embedding.weight
    assert [names for (_, names), *_ in tied_parameters(model)] == ["weight"]
    assert model.embedding.weight.detach().std().item() == pytest.approx(0.02, rel=0.1)


def test_what_would_stay_undefined_is_refused() -> None:
    model = nn.Module()
    model.register_buffer("table", torch.empty(2, device="meta"))
    with pytest.raises(AssertionError, match=r"buffers \['table'\] would be undefined"):
        allocate(model, CPU)
    odd = Odd(["row"])
    odd.register_parameter("new", nn.Parameter(torch.empty(2, device="meta")))
    with pytest.raises(AssertionError, match="new has no initializer"):
        materialise(odd, CPU, 0)
