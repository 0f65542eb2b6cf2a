"""The chunked output projection and loss against the oracle that holds all logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from armillary.kernels import linear_cross_entropy, reference


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def _inputs(dtype: torch.dtype, tokens: int = 50) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(tokens, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(20, 8, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 20, (tokens,))
    labels[::7] = -100
    return hidden, weight, labels


@pytest.mark.parametrize("chunk_tokens", [1, 16, 50, 1024])
def test_loss_and_gradients_equal_the_oracle(chunk_tokens: int) -> None:
    hidden, weight, labels = _inputs(torch.float64)
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk_tokens)
    expected = reference.linear_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    got = torch.autograd.grad(loss / 43, (hidden, weight))
    want = torch.autograd.grad(expected / 43, (hidden, weight))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def test_gradients_pass_finite_differences() -> None:
    hidden, weight, labels = _inputs(torch.float64, tokens=6)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, labels, chunk_tokens=4), (hidden, weight)
    )


@pytest.mark.parametrize("tokens", [0, 5])
def test_without_valid_labels_loss_and_gradients_are_zero(tokens: int) -> None:
    hidden, weight, labels = _inputs(torch.float32, tokens)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100))
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert loss.item() == 0
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


def test_logits_too_large_for_exp_and_hopeless_targets_stay_finite() -> None:
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.tensor([1]))
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert loss.item() == 2e4
    assert all(grad.isfinite().all() for grad in grads)


def test_bf16_hidden_and_fp32_master_weight_keep_their_dtypes_and_exact_scaling() -> None:
    hidden, weight, labels = _inputs(torch.float32)
    low = hidden.detach().bfloat16().requires_grad_()
    loss = linear_cross_entropy(low, weight, labels, chunk_tokens=16)
    rounded = weight.detach().bfloat16().double().requires_grad_()
    exact = low.detach().double().requires_grad_()
    expected = reference.linear_cross_entropy(exact, rounded, labels)
    factor = 1 / 4099  # rounds badly in bf16
    got = torch.autograd.grad(loss * factor, (low, weight))
    want = torch.autograd.grad(expected * factor, (exact, rounded))
    assert (loss.dtype, got[0].dtype, got[1].dtype) == (torch.float32, low.dtype, weight.dtype)
    torch.testing.assert_close(loss.double(), expected, rtol=4e-3, atol=0)
    for g, w in zip(got, want, strict=True):
        assert float((g - w).norm() / w.norm()) < 1.5 * torch.finfo(torch.bfloat16).eps


class _LargestTensor(TorchDispatchMode):
    """Records the most elements any operation returned, and whether a matrix product ran."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        self.products += func is torch.ops.aten.mm.default
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.numel())
        return out


def test_all_logits_never_exist() -> None:
    hidden, weight, labels = _inputs(torch.float32, tokens=400)
    with _LargestTensor() as seen:
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=40).backward()
    assert seen.elements == hidden.numel() < 400 * 20


def test_validation_computes_no_gradients() -> None:
    hidden, weight, labels = _inputs(torch.float32)
    with torch.no_grad(), _LargestTensor() as seen:
        linear_cross_entropy(hidden, weight, labels)
    assert seen.products == 1


def test_compiles_into_one_graph() -> None:
    torch.compiler.reset()
    hidden, weight, labels = _inputs(torch.float64)
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    loss = compiled(hidden, weight, labels, chunk_tokens=16)
    expected = reference.linear_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    got = torch.autograd.grad(loss, (hidden, weight))
    want = torch.autograd.grad(expected, (hidden, weight))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
