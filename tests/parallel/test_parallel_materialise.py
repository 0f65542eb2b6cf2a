"""First weights: a function of (seed, name, index in the whole parameter) and of nothing else."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_cases import tiny, tiny_experts
from torch import nn

from armillary.models.layers.initializer import ONES, ZEROS, Initializer, truncated_normal
from armillary.parallel.blocks import tied_parameters
from armillary.parallel.config import Parallel
from armillary.parallel.execution import InTurn
from armillary.parallel.layout import Layouts, local_ranges, local_shape
from armillary.parallel.materialise import allocate, materialise
from armillary.parallel.mesh import Mesh
from armillary.parallel.model import ParallelModel, WholeModel
from armillary.parallel.random_numbers import CHUNK, NormalStream

CPU = torch.device("cpu")
SHAPES = {"row": (7,), "matrix": (5, 6), "wide": (2, CHUNK + 3), "cube": (3, 4, 5)}


class Odd(nn.Module):
    """Parameters of shapes that no number of ranks divides, and a buffer that is saved."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.empty(SHAPES[name], device="meta")))
        self.gain = nn.Parameter(torch.empty(3, device="meta"))
        self.register_buffer("bias", torch.empty(3, device="meta"))

    def initializers(self) -> dict[str, Initializer]:
        drawn = {name: truncated_normal(0.5) for name in SHAPES}
        return drawn | {"gain": ONES, "bias": ZEROS}


def whole(names: list[str], seed: int = 1) -> dict[str, torch.Tensor]:
    model = Odd(names)
    materialise(model, CPU, seed)
    return model.state_dict()


PARALLEL = Parallel(tp=2, cp=2, dp_replicate=2, ep=4, expert_tp=2)
CUTS = {
    "row": [("fsdp", 0)],
    "matrix": [("tp", 0), ("fsdp", 0)],
    "wide": [("tp", 1), ("fsdp", 0)],
    "cube": [("ep", 0), ("expert_tp", 2), ("expert_fsdp", 1)],
}


def part(rank: int) -> tuple[dict[str, torch.Tensor], Layouts, Mesh]:
    """The odd parameters as one rank of 16 has them; no other rank is needed for it."""
    mesh, model = Mesh.imagined(PARALLEL, 16, rank), Odd(list(SHAPES))
    whole_model, layouts = WholeModel.of(model), Layouts.of(model)
    for name, cuts in CUTS.items():
        for axis, dim in cuts:
            layouts.split(name, axis, dim)
        shape = local_shape(layouts[name], mesh)
        setattr(model, name, nn.Parameter(torch.empty(shape, device="meta")))
    executor = InTurn(model, mesh)
    parallel = ParallelModel(
        [model], layouts=layouts, mesh=mesh, whole=whole_model, executor=executor
    )
    materialise(parallel, CPU, 1)
    return parallel.state_dict(), layouts, mesh


def test_parts_of_any_shape_are_parts_of_the_same_tensors() -> None:
    expected = whole(list(SHAPES))
    seen = {name: torch.zeros_like(value, dtype=torch.int64) for name, value in expected.items()}
    for rank in range(16):
        tensors, layouts, mesh = part(rank)
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            own = tuple(slice(*indices) for indices in local_ranges(layouts[name], mesh))
            assert torch.equal(tensor, expected[name][own]), (rank, name)
            seen[name][own] += 1
    for name, count in seen.items():  # every element is somewhere, and equally often
        assert count.unique().numel() == 1 and count.flatten()[0] > 0, name


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


def test_selection_biases_start_at_zero_and_their_names_are_those_of_the_model() -> None:
    with torch.device("meta"):
        model = tiny_experts().build()
    materialise(model, CPU, 0)
    bias = model.state_dict()["layers.1.feed_forward.router.expert_bias"]
    assert torch.equal(bias, torch.zeros(4))


def test_what_would_stay_undefined_is_refused() -> None:
    model = nn.Module()
    model.register_buffer("table", torch.empty(2, device="meta"), persistent=False)
    with pytest.raises(AssertionError, match=r"buffers \['table'\] would be undefined"):
        allocate(model, CPU)
    odd = Odd(["row"])
    odd.register_parameter("new", nn.Parameter(torch.empty(2, device="meta")))
    with pytest.raises(AssertionError, match="new has no initializer"):
        materialise(odd, CPU, 0)
