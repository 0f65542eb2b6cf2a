"""The grouped product of experts against a loop over them, with every odd shape they come in."""

from __future__ import annotations

import pytest
import torch

from armillary.kernels.grouped import grouped_bias, grouped_linear

COUNTS = {"uneven": [3, 0, 9, 4], "one": [0, 0, 16, 0], "none": [0, 0, 0, 0]}
ROUNDING = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def loop(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, counts: list[int]
) -> torch.Tensor:
    parts = x.split(counts)
    products = [part @ w.T + b for part, w, b in zip(parts, weight, bias, strict=True)]
    return torch.cat(products)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("widths", [(16, 24), (5, 7)], ids=["aligned", "unaligned"])
def test_grouped_products_and_gradients_equal_a_loop(
    dtype: torch.dtype, counts: list[int], widths: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, outputs = widths
    shapes = [(sum(counts), inputs), (len(counts), outputs, inputs), (len(counts), outputs)]
    tensors = [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    ours, exact = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    exact = [t.detach().double().requires_grad_() for t in exact]
    out = grouped_bias(grouped_linear(ours[0], ours[1], ends), ours[2], ends)
    expected = loop(*exact, counts)
    assert out.shape == expected.shape
    torch.testing.assert_close(out.double(), expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
    out.sum().backward()  # an expanded gradient
    expected.sum().backward()
    for one, other in zip(ours, exact, strict=True):
        assert one.grad is not None, "a group without rows has a gradient too"
        assert other.grad is not None
        close = 20 * ROUNDING[dtype]
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=close, atol=close)


def test_a_grouped_product_needs_no_values_for_its_shape() -> None:
    x = torch.empty(16, 8, device="meta", requires_grad=True)
    weight = torch.empty(4, 24, 8, device="meta", requires_grad=True)
    ends = torch.empty(4, dtype=torch.int32, device="meta")
    out = grouped_linear(x, weight, ends)
    out.sum().backward()
    assert (out.shape, x.grad.shape, weight.grad.shape) == ((16, 24), x.shape, weight.shape)


def test_the_library_has_the_kernel_that_torch_213_and_its_two_predecessors_have() -> None:
    assert torch.__version__.split("+")[0].rsplit(".", 1)[0] in ("2.11", "2.12", "2.13")
    assert callable(torch.nn.functional.grouped_mm)
