"""The gradient norm is the norm of all gradients, the same on every mesh, and divides them once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from parallel_cases import Case, batches, built, wholes
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from armillary.parallel import Parallel, Scale
from armillary.parallel.gradients import (
    GROUPS,
    gradient_norms,
    kind_of,
    norms_by_group,
    norms_by_name,
    scale_and_clip,
    total_norm,
)
from armillary.parallel.layout import local_tensor
from armillary.parallel.model import ParallelModel
from armillary.precision import Precision
from armillary.resilience.guard import gradients_at_fault
from armillary.tasks.next_token import NextToken
from ranks import run_ranks

FP32 = Precision(compute="float32")
MESHES = {
    "HSDP 2x2, experts": Case(
        scale=Scale(precision=FP32, parallel=Parallel(dp_replicate=2, ep=2)), experts=True
    ),
    "PP 2 x TP 2, tied": Case(
        scale=Scale(precision=FP32, parallel=Parallel(pp=2, tp=2)), tied=True, microbatches=2
    ),
    "TP 2 x EP 2": Case(scale=Scale(precision=FP32, parallel=Parallel(tp=2, ep=2)), experts=True),
    "FSDP 2 x TP 2": Case(scale=Scale(precision=FP32, parallel=Parallel(tp=2))),
}
LIMIT = 0.05
ORDERS = (1.0, 1.5, 2.0, 3.0, 60.0, math.inf)
"""Of norms; the 60th powers of most of these gradients are no float64 numbers."""


def alone(case: Case) -> Case:
    return Case(scale=Scale(precision=FP32), experts=case.experts, tied=case.tied)


def stepped(case: Case) -> tuple[ParallelModel, int]:
    """A model with the gradients of a sum."""
    model = built(case)
    microbatches, weight = batches(model, case.microbatches)
    model.forward_backward(NextToken(), microbatches)
    return model, weight


Seen = tuple[dict[str, float], dict[str, float], list[float], float, dict[str, Tensor]]


def seen(case: Case) -> Seen:
    """Norms by group and name, of every order, the 2-norm, and the gradients after clipping."""
    model, weight = stepped(case)
    groups, names = norms_by_group(model, 3.0), norms_by_name(model)
    orders = [float(scale_and_clip(model, 1, math.inf, order)) for order in ORDERS]
    norm = float(scale_and_clip(model, weight, LIMIT))
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return groups, names, orders, norm, wholes(model, gradients)


def all_seen(cases: list[Case]) -> list[Seen]:
    return [seen(case) for case in cases]


def test_norms_and_clipped_gradients_are_those_of_one_process() -> None:
    cases = list(MESHES.values())
    for rank in run_ranks(all_seen, 4, cases):
        for (name, case), found in zip(MESHES.items(), rank, strict=True):
            groups, names, orders, norm, gradients = found
            exact_groups, exact_names, exact_orders, exact, clipped = seen(alone(case))
            assert exact > LIMIT
            assert groups == pytest.approx(exact_groups, rel=1e-6), name
            assert names == pytest.approx(exact_names, rel=1e-6), name
            assert orders == pytest.approx(exact_orders, rel=1e-6), name
            assert norm == pytest.approx(exact, rel=1e-6), name
            for key, expected in clipped.items():
                error = (gradients[key] - expected).norm() / expected.norm()
                assert error < 1e-6, (name, key)


def test_one_process_measures_what_its_gradients_are() -> None:
    model, weight = stepped(Case(scale=Scale(precision=FP32), experts=True))
    squares = {name: p.grad.double().square().sum() for name, p in model.named_parameters()}
    exact = math.sqrt(sum(squares.values()))
    assert norms_by_name(model) == pytest.approx({n: math.sqrt(s) for n, s in squares.items()})
    groups = norms_by_group(model)
    assert set(groups) == set(GROUPS) - {"other"}
    assert math.hypot(*groups.values()) == pytest.approx(exact, rel=1e-12)
    largest = max(float(p.grad.abs().max()) for p in model.parameters())
    assert float(gradient_norms(model, math.inf).max()) == largest

    everything = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    everything /= largest  # powers of what is left are numbers that torch can add
    for order in ORDERS:
        expected = largest * float(torch.linalg.vector_norm(everything, order))
        norms = gradient_norms(model, order)
        assert float(total_norm(norms, order)) == pytest.approx(expected, rel=1e-12)

    before = [p.grad.clone() for p in model.parameters()]
    assert float(scale_and_clip(model, weight, math.inf)) == pytest.approx(exact / weight)
    for grad, parameter in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, grad / weight, rtol=2e-7, atol=0)
    assert float(scale_and_clip(model, 1, LIMIT)) == pytest.approx(exact / weight)
    assert float(total_norm(gradient_norms(model))) == pytest.approx(LIMIT, rel=1e-6)
    assert float(scale_and_clip(model, 1, 2 * LIMIT)) == pytest.approx(LIMIT, rel=1e-6)
    assert float(total_norm(gradient_norms(model))) == pytest.approx(LIMIT, rel=1e-6)
    for order in ORDERS:
        scale_and_clip(model, 1, LIMIT / 1e3, order)
        clipped = float(total_norm(gradient_norms(model, order), order))
        assert clipped == pytest.approx(LIMIT / 1e3, rel=1e-6)
        scale_and_clip(model, 1e-6, math.inf)


def test_a_missing_gradient_counts_as_zero() -> None:
    model, _ = stepped(Case(scale=Scale(precision=FP32)))
    whole = float(total_norm(gradient_norms(model)))
    head = dict(model.named_parameters())["head.weight"]
    own = float(head.grad.double().norm())
    head.grad = None
    assert float(total_norm(gradient_norms(model))) == pytest.approx(math.sqrt(whole**2 - own**2))
    assert norms_by_name(model)["head.weight"] == 0.0


class _NothingUnwaited(TorchDispatchMode):
    """Refuses copies that may be read before they are there."""

    def __torch_dispatch__(
        self, function: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert not (kwargs or {}).get("non_blocking"), function
        return function(*args, **kwargs or {})


def test_gradients_on_the_host_are_not_scaled_before_the_factor_is_there() -> None:
    model, weight = stepped(Case(scale=Scale(precision=FP32)))
    with _NothingUnwaited():
        scale_and_clip(model, weight, LIMIT)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(bad: float, order: float) -> None:
    model, weight = stepped(Case(scale=Scale(precision=FP32)))
    gradient = local_tensor(dict(model.named_parameters())["norm.weight"].grad)
    gradient[3] = bad
    assert not math.isfinite(float(scale_and_clip(model, weight, 1.0, order)))
    found = gradients_at_fault((name, p.grad) for name, p in model.named_parameters())
    assert found == ["norm.weight"]  # the others do not become so by it


def test_kinds_of_parameters_are_told_by_their_names() -> None:
    assert {
        name: kind_of(name)
        for name in (
            "layers.0.attention.query_norm.weight",
            "layers.0.attention.core.sinks",
            "layers.3.feed_forward.experts.gate",
            "layers.3.feed_forward.shared.up.weight",
            "layers.3.feed_forward.router.weight",
            "norm.weight",
            "embedding.weight",
            "head.weight",
            "layers.4.projection.weight",
        )
    } == {
        "layers.0.attention.query_norm.weight": "norms",
        "layers.0.attention.core.sinks": "attention",
        "layers.3.feed_forward.experts.gate": "experts",
        "layers.3.feed_forward.shared.up.weight": "feed_forward",
        "layers.3.feed_forward.router.weight": "router",
        "norm.weight": "norms",
        "embedding.weight": "embedding",
        "head.weight": "head",
        "layers.4.projection.weight": "other",
    }
