"""MXFP8 against the specification, block by block in Python."""

from __future__ import annotations

import math

import pytest
import torch
from float8_table import nearest_in_table
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.kernels.mx import BLOCK, Blocks, mx_numbers, mx_product, round_to_mx


def by_the_specification(x: torch.Tensor) -> torch.Tensor:
    """Section 6.3 of OCP MX v1.0: the shared exponent, then every element, of a block."""
    out = torch.empty_like(x)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], BLOCK):
            block = x[row, start : start + BLOCK]
            maximum = float(block.abs().max())
            exponent = math.floor(math.log2(maximum)) - 8 if maximum > 0 else -126
            scale = 2.0 ** max(-126, exponent)
            elements = nearest_in_table((block / scale).clamp(-448, 448), torch.float8_e4m3fn)
            out[row, start : start + BLOCK] = elements * scale
    return out


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 100), st.integers(-30, 30), st.integers(0, 100))
def test_rounding_follows_the_specification(rows: int, width: int, size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator) * 2.0**size
    x[0, :7] = 0
    blocks = round_to_mx(x)
    assert blocks.values.shape == (rows, -(-width // BLOCK) * BLOCK)
    assert blocks.scale.shape == (rows, -(-width // BLOCK))
    kept = mx_numbers(blocks)
    assert torch.equal(kept[:, :width], by_the_specification(x))
    assert kept[:, width:].count_nonzero() == 0
    assert torch.equal(kept, kept.bfloat16().float())


def test_scales_are_bits_of_e8m0() -> None:
    x = torch.tensor([1.0, 448.0, 1.99 * 2.0**100, 3e38, 2.0**-140, 0.0])[:, None].expand(6, BLOCK)
    blocks = round_to_mx(x)
    assert blocks.scale[:, 0].tolist() == [127 - 8, 127, 127 + 92, 127 + 119, 1, 1]
    if hasattr(torch, "float8_e8m0fnu"):
        as_torch = blocks.scale.view(torch.float8_e8m0fnu).float()
        values = blocks.values.float().view(6, 1, BLOCK)
        assert torch.equal((values * as_torch[..., None]).flatten(-2), mx_numbers(blocks))


def test_blocks_saturate_between_448_and_512_times_their_scale() -> None:
    x = torch.zeros(1, BLOCK)
    x[0, :3] = torch.tensor([511.0, -480.0, 448.0])
    assert mx_numbers(round_to_mx(x))[0, :3].tolist() == [448.0, -448.0, 448.0]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_not_finite_makes_its_block_nan_and_no_other(bad: float) -> None:
    x = torch.ones(2, 3 * BLOCK)
    x[1, BLOCK] = bad
    kept = mx_numbers(round_to_mx(x))
    assert kept[1, BLOCK : 2 * BLOCK].isnan().all()
    assert kept.isnan().sum() == BLOCK


def test_a_product_is_that_of_the_numbers_over_stacks_too() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(9, 70, generator=generator), torch.randn(16, 70, generator=generator)
    y = mx_product(round_to_mx(a), round_to_mx(b), torch.float32)
    exact = by_the_specification(a).double() @ by_the_specification(b).double().mT
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)
    stacked = round_to_mx(torch.stack((a, 2 * a)))
    assert isinstance(stacked, Blocks)
    assert torch.equal(mx_numbers(stacked)[1], 2 * mx_numbers(round_to_mx(a)))
