"""Rounding to float8 against a table of all its values, and products against their definition."""

from __future__ import annotations

import math

import pytest
import torch
from float8_table import nearest_in_table
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from armillary.kernels import scaled_mm as adapter
from armillary.kernels.float8 import (
    E4M3,
    E5M2,
    SMALLEST,
    Scaled,
    float8_product,
    has_float8_units,
    largest,
    numbers,
    power_of_two_below,
    round_to_float8,
    transposed,
)

FORMATS = [pytest.param(E4M3, id="e4m3"), pytest.param(E5M2, id="e5m2")]


@pytest.mark.parametrize("dtype", FORMATS)
def test_numbers_are_rounded_to_the_nearest_of_the_format(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 200, generator=generator) * torch.logspace(-6, 6, 8)[:, None]
    rounded = round_to_float8(x, largest(x, 1), dtype)
    factor = (torch.finfo(dtype).max / x.abs().amax(1, keepdim=True).double()).float()
    factor = torch.exp2(torch.floor(torch.log2(factor)))
    assert torch.equal(rounded.scale, 1 / factor)
    assert torch.equal(rounded.values.float(), nearest_in_table(x * factor, dtype))
    assert torch.equal(numbers(rounded), numbers(rounded).bfloat16().float())


@pytest.mark.parametrize("dtype", FORMATS)
def test_what_is_above_the_maximum_saturates(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, -3.0, 1e30, -1e30]])
    rounded = round_to_float8(x, torch.tensor(1.0), dtype)
    assert numbers(rounded).tolist() == [[1.0, -1.75, 1.75, -1.75]]


def test_rows_of_zeros_stay_zeros_and_rows_of_any_size_keep_their_digits() -> None:
    sizes = [1e-28, 1e-12, 1.0, 1e12, 3e38]
    x = torch.linspace(-1, 1, 64).outer(torch.tensor(sizes)).T.contiguous()
    kept = numbers(round_to_float8(x, largest(x, 1)))
    # Half a unit in the last place of 3 bits, or of the subnormal numbers below 2^-6 / 448.
    assert torch.all((kept - x).abs() <= x.abs() * 2.0**-4 + x.abs().amax(1, keepdim=True) * 2e-5)
    for y in (torch.zeros(2, 16), torch.full((2, 16), SMALLEST / 1e6)):
        rounded = round_to_float8(y, largest(y, 1))
        assert numbers(rounded).count_nonzero() == 0
        assert rounded.scale.isfinite().all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_not_finite_makes_its_row_nan_and_no_other(bad: float) -> None:
    x = torch.ones(3, 16)
    x[1, 4] = bad
    kept = numbers(round_to_float8(x, largest(x, 1)))
    assert kept[1].isnan().any()
    assert torch.equal(kept[[0, 2]], torch.ones(2, 16))
    weight = round_to_float8(torch.ones(16, 16), torch.tensor(1.0))
    for emulate in (True, False):
        a = round_to_float8(x, largest(x, 1))
        y = float8_product(a, weight, torch.float32, emulate=emulate)
        assert y[1].isnan().all()
        assert y[[0, 2]].isfinite().all()


@given(st.floats(min_value=2.0**-120, max_value=2.0**127, width=32))
def test_power_of_two_below_is_exact(x: float) -> None:
    power = float(power_of_two_below(torch.tensor(x)))
    assert power <= x < 2 * power
    assert math.frexp(power)[0] == 0.5


def _scaled(x: Tensor, by_row: bool, dtype: torch.dtype) -> Scaled:
    maximum = largest(x, 1) if by_row else largest(x)
    return round_to_float8(x, maximum, dtype)


KINDS = st.tuples(st.booleans(), st.booleans(), st.sampled_from([E4M3, E5M2]), st.booleans())


@settings(max_examples=40, deadline=None)
@given(st.integers(8, 40), st.integers(1, 70), st.sampled_from([16, 32, 48]), KINDS)
def test_products_in_8_bits_equal_their_emulation_bit_for_bit(
    rows: int, inner: int, columns: int, kinds: tuple[bool, bool, torch.dtype, bool]
) -> None:
    a_by_row, b_by_row, dtype, public = kinds
    generator = torch.Generator().manual_seed(rows * 100 + inner)
    a = _scaled(torch.randn(rows, inner, generator=generator), a_by_row, dtype)
    b = _scaled(torch.randn(columns, inner, generator=generator), b_by_row, E4M3)
    with pytest.MonkeyPatch.context() as patch:
        if not public:
            patch.setattr(adapter, "_PUBLIC", None)
        real = float8_product(a, b, torch.float32, emulate=False)
        emulated = float8_product(a, b, torch.float32, emulate=True)
    assert torch.equal(real, emulated)
    exact = numbers(a).double() @ numbers(b).double().mT
    # The bound of a float32 sum of `inner` products, in any order (Higham 2002, section 3.1).
    sizes = numbers(a).double().abs() @ numbers(b).double().abs().mT
    assert ((emulated.double() - exact).abs() <= inner * 2.0**-24 * sizes).all()


def test_a_transpose_with_one_scale_is_the_transpose() -> None:
    x = torch.randn(16, 48, generator=torch.Generator().manual_seed(0))
    rounded = round_to_float8(x, largest(x))
    assert torch.equal(numbers(transposed(rounded)), numbers(rounded).mT)
    a = round_to_float8(x.mT, largest(x))
    product = float8_product(a, transposed(rounded), torch.bfloat16, emulate=False)
    assert product.dtype == torch.bfloat16
    assert torch.equal(product, float8_product(a, a, torch.bfloat16, emulate=False))


def test_the_largest_of_nothing_is_zero() -> None:
    assert largest(torch.ones(0, 3)).tolist() == 0.0
    assert largest(torch.ones(0, 3), 0).tolist() == [[0.0, 0.0, 0.0]]
    assert largest(torch.ones(2, 0), 1).tolist() == [[0.0], [0.0]]
    assert largest(torch.full((2, 3), -2.0).bfloat16()).dtype == torch.float32


def test_torch_2_11_to_2_13_have_a_product_in_8_bits() -> None:
    """The adapter uses the public function, of torch 2.10 and later, or else `_scaled_mm`."""
    assert tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14), "look at scaled_mm again"
    assert (adapter._PUBLIC is None) == (adapter._SCALING is None)
    assert adapter._PUBLIC is not None or hasattr(torch, "_scaled_mm")
    assert not has_float8_units(torch.device("cpu"))
