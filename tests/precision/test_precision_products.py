"""Products of Linears and experts in 8 bits against casts written out by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from armillary.kernels.mx import mx_numbers, round_to_mx
from armillary.precision.grouped_products import LowPrecisionGroupedProduct
from armillary.precision.products import RECIPES, LowPrecisionProduct

TENSORWISE, ROWWISE, EXACT, MX = RECIPES
Triple = tuple[Tensor, Tensor, Tensor]


def cast(x: Tensor, limit: float, dtype: torch.dtype, *, by_row: bool) -> Tensor:
    """x rounded to 8 bits and back, in the words of the formula."""
    maximum = x.float().abs().amax(1, keepdim=True) if by_row else x.float().abs().max()
    factor = (limit / maximum.double()).float()  # rounded once
    factor = torch.exp2(torch.floor(torch.log2(factor)))
    return (x.float() * factor).to(dtype).float() * (1 / factor)


def rows_of(x: Tensor) -> Tensor:
    """e4m3, a scale for each row."""
    return cast(x, 448, torch.float8_e4m3fn, by_row=True)


def whole(x: Tensor) -> Tensor:
    """e4m3, one scale."""
    return cast(x, 448, torch.float8_e4m3fn, by_row=False)


def gradient(x: Tensor) -> Tensor:
    """e5m2, one scale."""
    return cast(x, 57344, torch.float8_e5m2, by_row=False)


def blocks(x: Tensor) -> Tensor:
    """MXFP8 along the last dim; test_kernels_mx has its oracle."""
    return mx_numbers(round_to_mx(x))


def times(a: Tensor, b: Tensor) -> Tensor:
    """a bᵀ, filled up with zeros to 16 in what is reduced, which decides the order of the sums."""
    missing = -a.shape[1] % 16
    return F.pad(a, (0, missing)) @ F.pad(b, (0, missing)).mT


def by_hand_tensorwise(x: Tensor, w: Tensor, g: Tensor) -> Triple:
    a, b, c = whole(x), whole(w), gradient(g)
    return times(a, b), times(c, b.mT), times(c.mT, a.mT)


def by_hand_rowwise(x: Tensor, w: Tensor, g: Tensor) -> Triple:
    return (
        times(rows_of(x), rows_of(w)),
        times(rows_of(g), rows_of(w.mT)),
        times(rows_of(g.mT), rows_of(x.mT)),
    )


def by_hand_exact(x: Tensor, w: Tensor, g: Tensor) -> Triple:
    output, grad_x = times(rows_of(x), rows_of(w)), times(rows_of(g), whole(w).mT)
    return output, grad_x, g.mT @ x


def by_hand_mx(x: Tensor, w: Tensor, g: Tensor) -> Triple:
    return (
        times(blocks(x), blocks(w)),
        times(blocks(g), blocks(w.mT)),
        times(blocks(g.mT), blocks(x.mT)),
    )


BY_HAND: dict[str, Callable[[Tensor, Tensor, Tensor], Triple]] = {
    TENSORWISE: by_hand_tensorwise,
    ROWWISE: by_hand_rowwise,
    EXACT: by_hand_exact,
    MX: by_hand_mx,
}


def draw(tokens: int, inputs: int, outputs: int, dtype: torch.dtype, seed: int = 0) -> Triple:
    """x, weight and gradient, with rows and columns of very different sizes."""
    generator = torch.Generator().manual_seed(seed)

    def one(rows: int, columns: int) -> Tensor:
        x = torch.randn(rows, columns, generator=generator)
        sizes = torch.randint(-6, 6, (rows, 1), generator=generator)
        return (x * torch.exp2(sizes)).to(dtype)

    return one(tokens, inputs), one(outputs, inputs), one(tokens, outputs)


def run(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor, g: Tensor) -> Triple:
    """What a product and its backward pass give."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = product(x, w)
    return y.detach(), *torch.autograd.grad(y, (x, w), g)


@pytest.mark.parametrize("recipe", RECIPES)
@settings(max_examples=12, deadline=None)
@given(st.integers(8, 70), st.sampled_from([32, 64, 96]), st.sampled_from([32, 96]), st.integers())
def test_outputs_and_gradients_equal_casts_by_hand_bit_for_bit(
    recipe: str, tokens: int, inputs: int, outputs: int, seed: int
) -> None:
    x, w, g = draw(tokens, inputs, outputs, torch.float32, seed % 1000)
    wanted = BY_HAND[recipe](x, w, g)
    for emulate in (True, False):
        found = run(LowPrecisionProduct(recipe, emulate), x, w, g)
        for name, mine, theirs in zip(("y", "x", "weight"), found, wanted, strict=True):
            assert torch.equal(mine, theirs), f"{name}, emulate={emulate}"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 7])
def test_few_rows_differ_in_the_order_of_sums_only(recipe: str, tokens: int) -> None:
    x, w, g = draw(tokens, 64, 32, torch.float32)
    for emulate in (True, False):
        found = run(LowPrecisionProduct(recipe, emulate), x, w, g)
        for mine, theirs in zip(found, BY_HAND[recipe](x, w, g), strict=True):
            size = float(theirs.abs().max())
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6 * size)


@pytest.mark.parametrize("recipe", RECIPES)
def test_in_bfloat16_the_sums_are_rounded_once(recipe: str) -> None:
    x, w, g = draw(48, 64, 32, torch.bfloat16)
    found = run(LowPrecisionProduct(recipe, True), x, w, g)
    for mine, theirs in zip(found, BY_HAND[recipe](x, w, g), strict=True):
        assert mine.dtype == torch.bfloat16
        assert torch.equal(mine, theirs.bfloat16())
    batched = LowPrecisionProduct(recipe, True)(x.view(2, 24, 64), w)
    assert torch.equal(batched, found[0].view(2, 24, 32))


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_near_those_in_full_precision(recipe: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x, w, g = (torch.randn(256, 256, generator=generator) for _ in range(3))
    exact = (x @ w.mT, g @ w, g.mT @ x)
    found = run(LowPrecisionProduct(recipe, True), x, w, g)
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
    # Two roundings, each of 2^-4 at most and 2.5 % as a rule; e5m2 has half the digits.
    most = 0.075 if recipe == TENSORWISE else 0.045
    assert max(errors) < most, errors
    assert errors[2] < 1e-6 or recipe != EXACT


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_not_finite_stays_visible(recipe: str) -> None:
    x, w, g = draw(32, 32, 32, torch.float32)
    x[3, 5] = torch.inf
    y, _, grad_weight = run(LowPrecisionProduct(recipe, True), x, w, g)
    assert not y[3].isfinite().any()
    assert not grad_weight.isfinite().all()
    assert recipe == TENSORWISE or y[4:].isfinite().all()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("counts", [[5, 0, 33, 70], [0, 0, 0, 40], [32, 64, 0, 1]], ids=str)
def test_experts_are_linears_with_their_own_rows(recipe: str, counts: list[int]) -> None:
    parts = [draw(n, 64, 32, torch.float32, seed) for seed, n in enumerate(counts)]
    x, g = torch.cat([p[0] for p in parts]), torch.cat([p[2] for p in parts])
    w = torch.stack([p[1] for p in parts])
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    grouped = LowPrecisionGroupedProduct(recipe)
    found = run(lambda a, b: grouped(a, b, ends), x, w, g)
    # One scale for the rows of all experts would be none of an expert's business.
    linear = LowPrecisionProduct(ROWWISE if recipe == TENSORWISE else recipe, True)
    wanted = [run(linear, *part) if len(part[0]) else None for part in parts]
    for index in range(2):
        rows = torch.cat([one[index] for one in wanted if one is not None])
        torch.testing.assert_close(found[index], rows, rtol=1e-6, atol=1e-5)
    for expert, one in enumerate(wanted):
        if one is None:
            assert found[2][expert].count_nonzero() == 0
        else:
            torch.testing.assert_close(found[2][expert], one[2], rtol=1e-6, atol=1e-5)


def test_no_rows_at_all_give_zeros() -> None:
    ends = torch.zeros(2, dtype=torch.int32)
    for recipe in RECIPES:
        grouped = LowPrecisionGroupedProduct(recipe)
        x, w, g = torch.zeros(0, 32), torch.ones(2, 32, 32), torch.zeros(0, 32)
        y, grad_x, grad_weight = run(lambda a, b, f=grouped: f(a, b, ends), x, w, g)
        assert y.shape == grad_x.shape == (0, 32)
        assert grad_weight.count_nonzero() == 0
