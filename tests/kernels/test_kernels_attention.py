"""Blocked attention against its oracle: values, gradients, packing, precision, compilation."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels import attention, blocked_attention, reference


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def _inputs(
    batch: int, heads: int, kv_heads: int, length: int, width: int, *, dtype: torch.dtype
) -> list[Tensor]:
    """Query, key and value laid out as projections leave them, `[B, S, heads, P]` in memory."""
    shapes = [(batch, length, count, width) for count in (heads, kv_heads, kv_heads)]
    return [
        torch.randn(shape, dtype=torch.float64).to(dtype).transpose(1, 2).requires_grad_()
        for shape in shapes
    ]


def _starts(rows: list[list[int]]) -> Tensor:
    """The `starts` tensor of rows of document lengths."""
    out = []
    for lengths in rows:
        row, begin = [], 0
        for length in lengths:
            row += [begin] * length
            begin += length
        out.append(row)
    return torch.tensor(out)


PACKINGS = {
    "one document": (None, 300),
    "ragged documents": ([[1, 299], [130, 1, 126, 43]], 300),
    "documents on block boundaries": ([[128, 128], [256]], 256),
    "shorter than a block": ([[5, 2, 10], [17]], 17),
    "a single token": ([[1], [1]], 1),
}


@pytest.mark.parametrize(("rows", "length"), PACKINGS.values(), ids=PACKINGS.keys())
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (3, 1)])
def test_values_and_gradients_equal_the_oracle(
    rows: list[list[int]] | None, length: int, heads: int, kv_heads: int
) -> None:
    inputs = _inputs(2, heads, kv_heads, length, 6, dtype=torch.float64)
    starts = None if rows is None else _starts(rows)
    out, expected = blocked_attention(*inputs, starts), reference.attention(*inputs, starts)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    grad = torch.randn_like(expected)
    for got, want in zip(
        torch.autograd.grad(out, inputs, grad),
        torch.autograd.grad(expected, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def test_work_cut_by_heads_and_by_rows_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = _inputs(3, 4, 2, 200, 8, dtype=torch.float64)
    starts = _starts([[200], [20, 180], [150, 50]])
    whole = blocked_attention(*inputs, starts, 0.3)
    for scratch in (1, 128 * 200 * 2, 128 * 200 * 4):
        monkeypatch.setattr(attention, "_SCRATCH_ELEMENTS", scratch)
        torch.testing.assert_close(
            blocked_attention(*inputs, starts, 0.3), whole, rtol=1e-13, atol=1e-14
        )


def test_gradients_pass_finite_differences() -> None:
    inputs = _inputs(1, 2, 1, 6, 4, dtype=torch.float64)
    starts = _starts([[2, 4]])
    assert torch.autograd.gradcheck(lambda *x: blocked_attention(*x, starts), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_documents_change_no_bit(dtype: torch.dtype) -> None:
    inputs = _inputs(2, 4, 2, 300, 16, dtype=dtype)
    starts = _starts([[40, 160, 100], [299, 1]])
    mine = slice(40, 200)
    others = torch.ones(300, dtype=torch.bool)
    others[mine] = False

    def outcome(tensors: list[Tensor]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = blocked_attention(*leaves, starts)
        out[0, :, mine].square().sum().backward()
        return [
            out[0, :, mine].detach(),
            *(x.grad[0, :, mine] for x in leaves if x.grad is not None),
        ]

    before = outcome(inputs)
    changed = [x.detach().clone() for x in inputs]
    for x in changed:
        x[0, :, others] = 1e4 * torch.randn_like(x[0, :, others])
        x[1] += 1
    assert all(torch.equal(a, b) for a, b in zip(before, outcome(changed), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_no_larger_than_that_of_torch(dtype: torch.dtype) -> None:
    inputs = _inputs(2, 4, 4, 320, 64, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    grad = torch.randn(2, 4, 320, 64, dtype=torch.float64).to(dtype)
    truth = torch.autograd.grad(reference.attention(*exact), exact, grad.double())

    def errors(out: Tensor) -> list[float]:
        grads = torch.autograd.grad(out, inputs, grad)
        return [float((g - t).norm() / t.norm()) for g, t in zip(grads, truth, strict=True)]

    ours = errors(blocked_attention(*inputs))
    eager = errors(reference.attention(*inputs))
    fused = errors(F.scaled_dot_product_attention(*inputs, is_causal=True))
    if dtype == torch.bfloat16:
        assert all(o <= 1.05 * e for o, e in zip(ours, eager, strict=True)), (ours, eager, fused)
    else:
        assert all(o < 2e-6 for o in ours), ours


def test_repeats_are_bit_equal() -> None:
    inputs = _inputs(2, 4, 2, 300, 16, dtype=torch.bfloat16)
    starts = _starts([[40, 260], [300]])
    runs = []
    for _ in range(2):
        out = blocked_attention(*inputs, starts)
        runs.append([out, *torch.autograd.grad(out, inputs, torch.ones_like(out))])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_the_output_projection_needs_no_copy() -> None:
    query, key, value = _inputs(2, 4, 2, 20, 8, dtype=torch.float32)
    out = blocked_attention(query, key, value)
    assert out.transpose(1, 2).is_contiguous()


def test_it_is_one_node_that_varying_documents_do_not_recompile() -> None:
    torch.compiler.reset()
    compiled = torch.compile(blocked_attention, backend="aot_eager", fullgraph=True)
    inputs = _inputs(2, 4, 2, 40, 8, dtype=torch.float64)
    stance: Literal["default", "fail_on_recompile"] = "default"
    for rows in ([[40], [40]], [[1, 39], [20, 20]], [[40], [3, 37]]):
        starts = _starts(rows)
        with torch.compiler.set_stance(stance):
            out = compiled(*inputs, starts)
        expected = reference.attention(*inputs, starts)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
        got = torch.autograd.grad(out.sum(), inputs)
        want = torch.autograd.grad(expected.sum(), inputs)
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
        stance = "fail_on_recompile"


def test_registration_passes_torchs_own_checks() -> None:
    query, key, value = _inputs(1, 2, 1, 9, 4, dtype=torch.float32)
    starts = _starts([[4, 5]])
    operator = torch.ops.armillary.blocked_attention
    torch.library.opcheck(operator, (query, key, value, starts, 0.5))
    torch.library.opcheck(operator, (query, key, value, None, 0.5))
