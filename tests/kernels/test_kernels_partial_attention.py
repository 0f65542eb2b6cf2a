"""Partial attention against its oracle, and parts merged by lse against the whole."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from armillary.kernels import (
    attention_tiles,
    attention_with_sinks,
    blocked_attention,
    partial_attention,
    reference,
)
from armillary.kernels.partial_attention import (
    partial_attention_backward,
    partial_attention_forward,
    row_delta,
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def _inputs(queries: int, keys: int, heads: int, kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
    """Query and key 6 wide, value 4 wide, laid out as projections leave them."""
    shapes = [(2, queries, heads, 6), (2, keys, kv_heads, 6), (2, keys, kv_heads, 4)]
    return [
        torch.randn(shape, dtype=torch.float64).to(dtype).transpose(1, 2).requires_grad_()
        for shape in shapes
    ]


def _starts(index: Tensor, rows: list[list[int]], window: int | None = None) -> Tensor:
    """`starts` at these places of rows of document lengths, seen through a window."""
    begins = [
        torch.tensor([sum(row[:n]) for n, c in enumerate(row) for _ in range(c)]) for row in rows
    ]
    starts = torch.stack(begins)[:, index]
    return starts if window is None else torch.maximum(starts, index - window + 1)


RAGGED = [[1, 299], [130, 1, 126, 43]]
EVERY = torch.arange(300)
ENDS = torch.cat((EVERY[:60], EVERY[220:]))  # what a rank holds of a row: a head and a tail
CASES = {
    "whole rows": (EVERY, EVERY, None),
    "packed rows": (EVERY, EVERY, _starts(EVERY, RAGGED)),
    "a window in packed rows": (EVERY, EVERY, _starts(EVERY, RAGGED, 33)),
    "head and tail against all": (ENDS, EVERY, _starts(ENDS, RAGGED)),
    "queries before, among and after keys": (EVERY, EVERY[100:180], None),
    "a window that misses the keys": (ENDS, EVERY[100:180], _starts(ENDS, RAGGED, 50)),
    "only future keys": (EVERY[:50], EVERY[50:], None),
    "one query": (EVERY[299:], EVERY, None),
}


@pytest.mark.parametrize(("places", "keys", "starts"), CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (2, 2)])
def test_results_and_gradients_equal_the_oracle(
    places: Tensor, keys: Tensor, starts: Tensor | None, heads: int, kv_heads: int
) -> None:
    inputs = _inputs(len(places), len(keys), heads, kv_heads, torch.float64)
    ours = partial_attention(*inputs, places, keys, starts=starts, scale=0.3)
    expected = reference.partial_attention(*inputs, places, keys, starts=starts, scale=0.3)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-13)
    seen = expected[1].isfinite()
    weights = [
        torch.randn_like(x).masked_fill(~m, 0)
        for x, m in zip(expected, (seen[..., None].expand_as(expected[0]), seen), strict=True)
    ]
    got, want = (torch.autograd.grad(results, inputs, weights) for results in (ours, expected))
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def test_gradients_of_either_result_alone_equal_the_oracle() -> None:
    inputs = _inputs(300, 300, 4, 2, torch.float64)
    starts = _starts(EVERY, RAGGED)
    ours = partial_attention(*inputs, EVERY, EVERY, starts=starts)
    expected = reference.partial_attention(*inputs, EVERY, EVERY, starts=starts)
    for got, want in zip(ours, expected, strict=True):
        weight = torch.randn_like(want)
        options: dict[str, Any] = {
            "allow_unused": True,
            "materialize_grads": True,
            "retain_graph": True,
        }
        torch.testing.assert_close(
            torch.autograd.grad(got, inputs, weight, **options),
            torch.autograd.grad(want, inputs, weight, **options),
            rtol=1e-11,
            atol=1e-12,
        )


def test_what_sees_nothing_is_zero_with_a_lse_of_minus_infinity_and_no_gradient() -> None:
    inputs = _inputs(20, 20, 2, 1, torch.float32)
    index = torch.arange(20)
    out, lse = partial_attention(*inputs, index, index + 5)
    assert (out[:, :, :5] == 0).all() and (lse[:, :, :5] == -torch.inf).all()
    assert lse[:, :, 5:].isfinite().all()
    grads = torch.autograd.grad((out, lse), inputs, (torch.ones_like(out), torch.ones_like(lse)))
    assert all(grad.isfinite().all() for grad in grads)
    assert (lse[:, :, :5] == -torch.inf).all()  # the backward pass left it as it was
    assert (grads[0][:, :, :5] == 0).all() and (grads[1][:, :, -5:] == 0).all()


def test_whole_rows_are_what_blocked_attention_computes() -> None:
    query, key, _ = _inputs(300, 300, 4, 2, torch.float32)
    value = torch.randn_like(key)
    starts = _starts(EVERY, RAGGED)
    out, _ = partial_attention(query, key, value, EVERY, EVERY, starts=starts)
    torch.testing.assert_close(
        out, blocked_attention(query, key, value, starts), rtol=1e-6, atol=1e-6
    )
    assert out.transpose(1, 2).is_contiguous()


def test_parts_merged_by_lse_and_backward_from_the_whole_equal_one_pass() -> None:
    inputs = [x.detach() for x in _inputs(300, 300, 4, 2, torch.float32)]
    starts = _starts(EVERY, RAGGED)
    options: dict[str, Any] = {"starts": starts, "scale": 0.4}
    out, lse = partial_attention_forward(*inputs, EVERY, EVERY, exact_out=True, **options)
    merged, total = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    grad = torch.randn_like(out)
    of_whole = {"lse": lse, "grad": grad, "delta": row_delta(out, grad, None)}
    whole = partial_attention_backward(*inputs, EVERY, EVERY, **of_whole, **options)
    grads = [torch.zeros_like(x) for x in inputs]
    for own in (slice(0, 90), slice(90, 210), slice(210, 300)):
        query, (key, value) = inputs[0], (x[:, :, own] for x in inputs[1:])
        part, part_lse = partial_attention_forward(
            query, key, value, EVERY, EVERY[own], exact_out=True, **options
        )
        new = torch.logaddexp(total, part_lse)
        safe = new.masked_fill(new == -torch.inf, 0)
        merged = (
            merged * (total - safe).exp()[..., None] + part * (part_lse - safe).exp()[..., None]
        )
        total = new
        parts = partial_attention_backward(
            query, key, value, EVERY, EVERY[own], **of_whole, **options
        )
        grads[0] += parts[0]
        for all_keys, one in zip(grads[1:], parts[1:], strict=True):
            all_keys[:, :, own] += one
    torch.testing.assert_close((merged, total), (out, lse), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grads, list(whole), rtol=1e-5, atol=2e-6)


def test_work_cut_by_heads_rows_and_smaller_blocks_gives_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = _inputs(300, 300, 4, 2, torch.float64)
    starts = _starts(EVERY, RAGGED)
    whole = partial_attention(*inputs, EVERY, EVERY, starts=starts)
    for scratch, most in ((1, 1 << 24), (128 * 300 * 4, 1 << 24), (1 << 20, 1), (1, 600 * 40)):
        monkeypatch.setattr(attention_tiles, "_SCRATCH_ELEMENTS", scratch)
        monkeypatch.setattr(attention_tiles, "_MOST_ELEMENTS", most)
        cut = partial_attention(*inputs, EVERY, EVERY, starts=starts)
        torch.testing.assert_close(cut, whole, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_documents_change_no_bit(dtype: torch.dtype) -> None:
    inputs = _inputs(300, 300, 4, 2, dtype)
    starts = _starts(EVERY, [[40, 160, 100], [299, 1]])
    mine = slice(40, 200)
    others = torch.ones(300, dtype=torch.bool)
    others[mine] = False

    def outcome(tensors: list[Tensor]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        out, lse = (x[0, :, mine] for x in partial_attention(*leaves, EVERY, EVERY, starts=starts))
        grads = torch.autograd.grad(out.square().sum() + lse.sum(), leaves)
        return [out.detach(), lse.detach(), *(grad[0, :, mine] for grad in grads)]

    changed = [x.detach().clone() for x in inputs]
    for x in changed:
        x[0, :, others] = 1e4 * torch.randn_like(x[0, :, others])
        x[1] += 1
    pairs = zip(outcome(inputs), outcome(changed), strict=True)
    assert all(torch.equal(before, after) for before, after in pairs)


def test_error_in_bfloat16_is_no_larger_than_that_of_eager_torch() -> None:
    inputs = _inputs(300, 300, 4, 2, torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    grad = torch.randn(2, 4, 300, 4).bfloat16()
    truth_out, _ = reference.partial_attention(*exact, EVERY, EVERY)
    truth = [truth_out.detach(), *torch.autograd.grad(truth_out, exact, grad.double())]

    def errors(function: Any) -> list[float]:
        out, _ = function(*inputs, EVERY, EVERY)
        results = [out.detach(), *torch.autograd.grad(out, inputs, grad)]
        return [float((r - t).norm() / t.norm()) for r, t in zip(results, truth, strict=True)]

    ours, eager = errors(partial_attention), errors(reference.partial_attention)
    assert all(o <= 1.05 * e for o, e in zip(ours, eager, strict=True)), (ours, eager)


def test_a_sink_is_one_more_logit_of_value_zero_in_the_softmax() -> None:
    inputs = _inputs(50, 50, 4, 2, torch.float64)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    index = torch.arange(50)
    ours = attention_with_sinks(*partial_attention(*inputs, index, index), sinks)
    query, key, value = (inputs[0], *(x.repeat_interleave(2, dim=1) for x in inputs[1:]))
    scores = (query @ key.mT * 6**-0.5).masked_fill(index > index[:, None], -torch.inf)
    scores = torch.cat((scores, sinks[:, None, None].expand(2, 4, 50, 1)), dim=-1)
    expected = scores.softmax(-1)[..., :-1] @ value
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-13)
    weight = torch.randn_like(expected)
    got, want = (torch.autograd.grad(x, [*inputs, sinks], weight) for x in (ours, expected))
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def test_it_is_one_node_that_varying_documents_do_not_recompile() -> None:
    torch.compiler.reset()
    compiled = torch.compile(partial_attention, backend="aot_eager", fullgraph=True)
    inputs = _inputs(40, 40, 4, 2, torch.float64)
    index = torch.arange(40)
    stance: Literal["default", "fail_on_recompile"] = "default"
    for rows in ([[40], [40]], [[1, 39], [20, 20]]):
        starts = _starts(index, rows)
        with torch.compiler.set_stance(stance):
            out, lse = compiled(*inputs, index, index, starts=starts)
        expected = reference.partial_attention(*inputs, index, index, starts=starts)
        torch.testing.assert_close((out, lse), expected, rtol=1e-12, atol=1e-13)
        got = torch.autograd.grad(out.sum() + lse.sum(), inputs)
        want = torch.autograd.grad(expected[0].sum() + expected[1].sum(), inputs)
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
        stance = "fail_on_recompile"


def test_registration_passes_torchs_own_checks() -> None:
    query, key, value = _inputs(9, 7, 2, 1, torch.float32)
    operator = torch.ops.armillary.partial_attention
    places, keys = torch.arange(9), torch.arange(2, 9)
    torch.library.opcheck(operator, (query, key, value, places, keys, None, 0.5))
