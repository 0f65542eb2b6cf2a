"""Products that hide communication against the collectives and products that they replace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensor_cases import LLAMA, Setting, loss_of, mesh_of, relative, split_model, whole_model
from torch import Tensor

from armillary.kernels import swiglu
from armillary.models.layers.attention import Attention
from armillary.models.layers.mlp import SwiGLU
from armillary.parallel.collectives import all_gather, group_name, reduce_scatter
from armillary.parallel.tensor import decomposed, symmetric
from armillary.parallel.tensor.asynchronous import overlap_region
from armillary.parallel.tensor.decomposed import gather_linear, linear_scatter
from armillary.parallel.tensor.region import TensorRanks
from ranks import run_ranks

BATCH, SHARE, INPUTS = 2, 3, 10
OUTPUTS = (8, 4, 4)


def tensors(dtype: torch.dtype) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor]:
    """A share, gate and up of whole rows, and weights before and after, different on every rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    length = SHARE * dist.get_world_size()
    share = torch.randn(BATCH, SHARE, INPUTS, generator=generator).to(dtype)
    rows = [torch.randn(BATCH, length, 6, generator=generator).to(dtype) for _ in range(2)]
    weights = [torch.randn(out, INPUTS, generator=generator).to(dtype) for out in OUTPUTS]
    last = torch.randn(INPUTS, 6, generator=generator).to(dtype)
    return share, rows, weights, last


def gathered(x: Tensor, weights: list[Tensor], group: str) -> list[Tensor]:
    rows = all_gather(x, -2, group)
    return [F.linear(rows, weight) for weight in weights]


def scattered(inputs: Sequence[Tensor], weight: Tensor, group: str) -> Tensor:
    x = inputs[0] if len(inputs) == 1 else swiglu(*inputs)
    return reduce_scatter(F.linear(x, weight), -2, group)


def results(
    dtype: torch.dtype,
    gather: Callable[[Tensor, list[Tensor], str], list[Tensor]],
    scatter: Callable[[Sequence[Tensor], Tensor, str], Tensor],
    group: str,
) -> list[Tensor]:
    """Values, then gradients, of both products."""
    share, rows, weights, last = tensors(dtype)
    leaves = [leaf.requires_grad_() for leaf in (share, *rows, *weights, last)]
    values = [*gather(share, weights, group)]
    values += [scatter(inputs, last, group) for inputs in (rows, rows[:1])]
    loss = sum((value.float().square() * (index + 1)).sum() for index, value in enumerate(values))
    assert isinstance(loss, Tensor)
    loss.backward()
    assert all(leaf.grad is not None for leaf in leaves)
    return [value.detach() for value in values] + [leaf.grad for leaf in leaves]  # type: ignore


def compare_all() -> dict[str, float]:
    torch.set_num_threads(1)
    group = group_name(dist.group.WORLD)
    assert group is not None
    deviations: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        expected = results(dtype, gathered, scattered, group)
        with mock.patch.object(decomposed, "Exchange", wraps=decomposed.Exchange) as exchange:
            ours = results(dtype, gather_linear, linear_scatter, group)
        # Each of the three products, forward and backward, goes once around the ring.
        assert exchange.call_count == 6 * (dist.get_world_size() - 1)
        with fused_semantics():
            fused = results(dtype, gather_linear, linear_scatter, group)
        kind = str(dtype).removeprefix("torch.")
        for name, found in (("ring", ours), ("symmetric memory", fused)):
            pairs = zip(found, expected, strict=True)
            deviations[f"{name} {kind}"] = max(relative(*pair) for pair in pairs)
    check_operators(group)
    deviations["models"] = compare_models()
    return deviations


def fused_semantics() -> mock._patch_dict:
    """torch's own reference of its fused operators, which themselves need GPUs."""
    from torch.distributed import _symmetric_memory as torchs

    operators = SimpleNamespace(
        fused_all_gather_matmul=torchs._fused_all_gather_matmul_fallback,
        fused_matmul_reduce_scatter=torchs._fused_matmul_reduce_scatter_fallback,
    )
    return mock.patch.multiple(  # type: ignore[return-value]
        symmetric, is_usable=lambda x, group: True, _operators=lambda: operators
    )


def check_operators(group: str) -> None:
    """What is said of each operator to the compiler is what it does."""
    share, rows, weights, last = tensors(torch.float32)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    for tensor in (share, *rows):
        tensor.requires_grad_()
    operators = torch.ops.armillary
    torch.library.opcheck(
        operators.gather_linear.default, (share, weights, group), test_utils=tests
    )
    torch.library.opcheck(operators.linear_scatter.default, (rows, last, group), test_utils=tests)


def compare_models() -> float:
    """The gradients of a whole decoder with and without overlap, and that it is overlapped."""
    gradients = []
    for asynchronous in (False, True):
        setting = Setting(asynchronous=asynchronous, biased=True)
        mesh = mesh_of(setting, dist.get_world_size())
        model, _ = split_model(setting, mesh, whole_model(setting))
        with mock.patch.object(decomposed, "Exchange", wraps=decomposed.Exchange) as exchange:
            loss_of(model).backward()
        steps = 2 * 4 * LLAMA.n_layers * (dist.get_world_size() - 1)
        assert exchange.call_count == (steps if asynchronous else 0)
        gradients.append([parameter.grad for parameter in model.parameters()])
        if asynchronous:
            check_other_products(model)
    return max(
        relative(ours, theirs)
        for ours, theirs in zip(*reversed(gradients), strict=True)
        if ours is not None and theirs is not None
    )


def check_other_products(model: torch.nn.Module) -> None:
    """Linears that multiply in their own way do so, with the collectives before and after."""
    expected = loss_of(model).detach()
    calls = []

    def product(x: Tensor, weight: Tensor) -> Tensor:
        calls.append(x.shape[-2])
        return F.linear(x, weight)

    for module in model.modules():
        if isinstance(module, Attention | SwiGLU):
            for child in module.children():
                if hasattr(child, "product"):
                    child.product = product
    with mock.patch.object(decomposed, "Exchange", side_effect=AssertionError):
        loss = loss_of(model).detach()
    assert relative(loss, expected) <= 1e-6
    assert len(calls) == 7 * LLAMA.n_layers and len(set(calls)) == 1


@pytest.mark.parametrize("world_size", [2, 4])
def test_values_and_gradients_are_those_of_the_synchronous_products(world_size: int) -> None:
    for deviations in run_ranks(compare_all, world_size):
        print(deviations)
        assert deviations["ring float32"] <= 1e-6
        assert deviations["symmetric memory float32"] <= 1e-6
        # The order of a sum in bfloat16: one rounding for each rank.
        assert deviations["ring bfloat16"] <= world_size * 2**-8
        assert deviations["symmetric memory bfloat16"] <= world_size * 2**-8
        assert deviations["models"] <= 1e-5


def test_a_region_without_one_projection_is_left_alone() -> None:
    region = SwiGLU(8, 16, std=1.0, output_std=1.0)
    region.project = None  # type: ignore[assignment]
    before = dict(vars(region))
    assert not overlap_region(region, TensorRanks("group", 2, 0))
    assert vars(region) == before


def test_symmetric_memory_is_for_gpus_and_has_the_operators_that_are_called() -> None:
    """Written for torch 2.11 to 2.13; the operators themselves run on GPUs only."""
    assert not symmetric.is_usable(torch.ones(2, 2, dtype=torch.bfloat16), "group")
    operators = symmetric._operators()
    gather = operators.fused_all_gather_matmul.default._schema
    scatter = operators.fused_matmul_reduce_scatter.default._schema
    assert [argument.name for argument in gather.arguments][:4] == [
        "A", "Bs", "gather_dim", "group_name",
    ]  # fmt: skip
    assert [argument.name for argument in scatter.arguments] == [
        "A", "B", "reduce_op", "scatter_dim", "group_name",
    ]  # fmt: skip
