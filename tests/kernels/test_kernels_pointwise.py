"""SwiGLU, RMS norm and rotary embedding against their oracles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from armillary.kernels import apply_rope, reference, rms_norm, rows, swiglu, swiglu_linear

Function = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def _tables(*shape: int) -> tuple[Tensor, Tensor]:
    angles = torch.randn(*shape, dtype=torch.float64)
    return angles.cos(), angles.sin()


def _case(name: str) -> tuple[Function, Function, list[Tensor], tuple[object, ...]]:
    """Kernel, oracle, differentiable inputs, other arguments."""
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    if name == "swiglu":
        return swiglu, reference.swiglu, [3 * x, torch.randn_like(x)], ()
    if name == "swiglu_linear":
        weight = torch.randn(6, 8, dtype=torch.float64)
        return swiglu_linear, reference.swiglu_linear, [3 * x, torch.randn_like(x), weight], ()
    if name == "rms_norm":
        return rms_norm, reference.rms_norm, [x, torch.randn(8, dtype=torch.float64)], (1e-5,)
    shape = (5, 4) if name == "rope" else (2, 5, 4)
    strided = torch.randn(2, 5, 3, 8, dtype=torch.float64).transpose(1, 2)
    return apply_rope, reference.apply_rope, [strided], _tables(*shape)


CASES = ["swiglu", "swiglu_linear", "rms_norm", "rope", "rope of packed rows"]


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_the_oracle(name: str) -> None:
    kernel, oracle, inputs, rest = _case(name)
    inputs = [x.requires_grad_() for x in inputs]
    out, expected = kernel(*inputs, *rest), oracle(*inputs, *rest)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-14)
    grad = torch.randn_like(expected)
    got = torch.autograd.grad(out, inputs, grad)
    want = torch.autograd.grad(expected, inputs, grad)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    assert torch.autograd.gradcheck(lambda *x: kernel(*x, *rest), inputs)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_that_of_one_rounding(name: str, dtype: torch.dtype) -> None:
    kernel, oracle, inputs, rest = _case(name)
    low = [x.to(dtype).requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in low]
    narrow = tuple(x.float() if isinstance(x, Tensor) else x for x in rest)
    wide = tuple(x.double() if isinstance(x, Tensor) else x for x in narrow)
    out, expected = kernel(*low, *narrow), oracle(*exact, *wide)
    grad = torch.randn_like(expected).to(dtype)
    got = [out.detach(), *torch.autograd.grad(out, low, grad)]
    want = [expected.detach(), *torch.autograd.grad(expected, exact, grad.double())]
    roundings = 3 if "swiglu" in name else 1  # its products pass through the working dtype
    for g, w in zip(got, want, strict=True):
        assert g.dtype == dtype
        assert float((g - w).norm() / w.norm()) < roundings * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", CASES)
def test_work_in_pieces_gives_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, _, inputs, rest = _case(name)
    inputs = [x.requires_grad_() for x in inputs]
    results = []
    for elements in (1 << 18, 50):
        monkeypatch.setattr(rows, "_ELEMENTS", elements)
        out = kernel(*inputs, *rest)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    torch.testing.assert_close(*results, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", CASES)
def test_compiles_into_one_graph(name: str) -> None:
    torch.compiler.reset()
    kernel, oracle, inputs, rest = _case(name)
    inputs = [x.requires_grad_() for x in inputs]
    compiled = torch.compile(kernel, backend="aot_eager", fullgraph=True)
    out, expected = compiled(*inputs, *rest), oracle(*inputs, *rest)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    got = torch.autograd.grad(out.sum(), inputs)
    want = torch.autograd.grad(expected.sum(), inputs)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def test_norm_of_zeros_is_zero_with_finite_gradients() -> None:
    x = torch.zeros(2, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(8, requires_grad=True)
    out = rms_norm(x, weight, 1e-5)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(out, torch.zeros_like(out))
    assert x.grad.isfinite().all()


def test_rope_of_a_strided_projection_is_contiguous_and_its_gradient_is_not_copied() -> None:
    projected = torch.randn(2, 5, 3 * 8, requires_grad=True)
    rotated = apply_rope(projected.view(2, 5, 3, 8).transpose(1, 2), *_tables(5, 4))
    assert rotated.is_contiguous()
    layouts: list[bool] = []
    projected.register_hook(lambda grad: layouts.append(grad.is_contiguous()))
    rotated.sum().backward()
    assert layouts == [True]
