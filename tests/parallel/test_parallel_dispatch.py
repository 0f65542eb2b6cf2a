"""Tokens to experts on other ranks and back: the matrices, and the bits, of one process."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from armillary.models.layers.dispatch import Routing, dispatch_locally
from armillary.models.layers.experts import Experts, clamped_swiglu
from armillary.models.layers.moe import MoE
from armillary.models.layers.recompute import recompute_contexts
from armillary.models.layers.router import Router, counts_of
from armillary.models.routing import RouterConfig
from armillary.parallel.config import Parallel
from armillary.parallel.experts import dispatch
from armillary.parallel.experts.expert_parallel import split_experts
from armillary.parallel.layout import Layouts, local_ranges
from armillary.parallel.ledger import Ledger
from armillary.parallel.mesh import Mesh
from ranks import run_ranks

DIM, HIDDEN, EXPERTS, ACTIVE = 32, 64, 8, 2
ROWS, LENGTH = 8, 48  # 384 tokens, some 96 for each expert
CPU = torch.device("cpu")
EP = {2: Parallel(dp_replicate=2, dp_shard=2, ep=2), 4: Parallel(dp_shard=4, ep=4)}
"""Both on four ranks: of two copies of ep 2, each sees the whole batch."""
ROUTERS = {
    "softmax": RouterConfig(),
    "sigmoid": RouterConfig(score="sigmoid", normalize=True, scale=2.5, balance_rate=1e-3),
}


@given(st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=4))
def test_rows_are_used_by_expert_then_source_then_order_at_the_source(
    counts: list[list[int]],
) -> None:
    arrived = [
        (source, expert, row)
        for source, by_expert in enumerate(counts)
        for expert, count in enumerate(by_expert)
        for row in range(count)
    ]
    order, inverse = dispatch.order_of_use(torch.tensor(counts), len(arrived))
    used = [arrived[index] for index in order.tolist()]
    assert used == sorted(arrived, key=lambda row: (row[1], row[0], row[2]))
    assert [used[index] for index in inverse.tolist()] == arrived


@dataclass
class Seen:
    """What must not depend on where experts are."""

    y: Tensor
    dx: Tensor
    weights: dict[str, Tensor]
    counts: Tensor


def whole_moe(config: RouterConfig, *, bias: bool = False) -> MoE:
    """A layer with the same weights on every rank."""
    torch.manual_seed(3)
    activation = {"activation": clamped_swiglu} if bias else {}
    router = Router(DIM, n_experts=EXPERTS, n_active=ACTIVE, std=1.0, config=config)
    experts = Experts(
        DIM, HIDDEN, n_experts=EXPERTS, std=1.0, output_std=1.0, bias=bias, **activation
    )
    moe = MoE(router=router, experts=experts)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(0, 0.2)
    return moe


def split_moe(whole: MoE, mesh: Mesh) -> tuple[MoE, Layouts]:
    """This rank's part of the layer, through the pass."""
    model = nn.ModuleDict({"moe": copy.deepcopy(whole).to("meta")})
    layouts = Layouts.of(model)
    split_experts(model, mesh, layouts)
    model.to_empty(device=CPU)
    values = whole.state_dict()
    with torch.no_grad():
        for name, tensor in model["moe"].state_dict().items():
            tensor.copy_(part(values[name], f"moe.{name}", layouts, mesh))
    return model["moe"], layouts


def part(whole: Tensor, name: str, layouts: Layouts, mesh: Mesh) -> Tensor:
    """What this rank holds of a whole parameter."""
    return whole[tuple(slice(*ends) for ends in local_ranges(layouts[name], mesh))]


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Hidden states and gradients of outputs; few directions, so that loads are uneven."""
    generator = torch.Generator().manual_seed(5)
    shift = 0.5 * torch.randn(DIM, generator=generator)
    x = torch.randn(ROWS, LENGTH, DIM, generator=generator) + shift
    return x.to(dtype), torch.randn(ROWS, LENGTH, DIM, generator=generator).to(dtype)


def run(moe: MoE, x: Tensor, dy: Tensor, *, recompute: bool = False) -> Seen:
    """Forward and backward."""
    moe.zero_grad()
    x = x.clone().requires_grad_()
    if recompute:
        y = checkpoint(moe, x, use_reentrant=False, context_fn=recompute_contexts)
    else:
        y = moe(x)
    y.backward(dy)
    weights = {name: p.grad.clone() for name, p in moe.experts.named_parameters()}
    return Seen(y.detach(), x.grad, weights, moe.take_counts())


def dealt(mesh: Mesh, axis: str) -> slice:
    """This rank's rows, dealt contiguously over an axis."""
    own = ROWS // mesh.degree(axis)
    return slice(own * mesh.coordinate(axis), own * (mesh.coordinate(axis) + 1))


def bits() -> list[tuple[Any, ...]]:
    """For every case: what differs from one process, and what must differ if order is wrong."""
    found = []
    for ep, parallel in EP.items():
        mesh = Mesh.create(parallel, CPU)
        rows = dealt(mesh, "ep")
        for score, config in ROUTERS.items():
            for dtype in (torch.float32, torch.bfloat16):
                whole = whole_moe(config)
                x, dy = batch(dtype)
                expected = run(whole, x, dy)
                moe, layouts = split_moe(whole, mesh)
                for recompute in (False, True):
                    seen = run(moe, x[rows], dy[rows], recompute=recompute)
                    wrong = differing(seen, expected, rows, layouts, mesh)
                    total = mesh.sum_over(seen.counts, ["ep"])
                    found.append((ep, score, dtype, wrong, torch.equal(total, expected.counts)))
                    assert expected.counts.min() >= 8, "an expert has too few rows to count"
    return found


def differing(seen: Seen, expected: Seen, rows: slice, layouts: Layouts, mesh: Mesh) -> list[str]:
    """Names of what is not bitwise equal."""
    pairs = {"y": (seen.y, expected.y[rows]), "dx": (seen.dx, expected.dx[rows])}
    for name, gradient in seen.weights.items():
        pairs[name] = gradient, part(expected.weights[name], f"moe.experts.{name}", layouts, mesh)
    return [name for name, (ours, theirs) in pairs.items() if not torch.equal(ours, theirs)]


def wrong_order() -> list[str]:
    """Names of what differs if rows are used in another order of their sources."""

    def last_source_first(counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
        sources = torch.arange(counts.shape[0]).repeat_interleave(counts.sum(1))
        experts = torch.cat([torch.arange(counts.shape[1]).repeat_interleave(c) for c in counts])
        order = (experts * counts.shape[0] - sources).argsort(stable=True)
        return order, order.argsort()

    mesh = Mesh.create(EP[4], CPU)
    rows = dealt(mesh, "ep")
    whole = whole_moe(ROUTERS["softmax"])
    x, dy = batch(torch.float32)
    expected = run(whole, x, dy)
    moe, layouts = split_moe(whole, mesh)
    with mock.patch.object(dispatch, "order_of_use", last_source_first):
        seen = run(moe, x[rows], dy[rows])
    return differing(seen, expected, rows, layouts, mesh)


def calls_when_recomputed() -> tuple[dict[str, int], int]:
    """All-to-alls of one forward and backward pass, with and without recomputation; and bytes."""
    mesh = Mesh.create(EP[4], CPU)
    moe, _ = split_moe(whole_moe(ROUTERS["softmax"]), mesh)
    x, dy = batch(torch.float32)
    rows = dealt(mesh, "ep")
    calls = {}
    for recompute in (False, True):
        with Ledger(mesh) as ledger:
            run(moe, x[rows], dy[rows], recompute=recompute)
        calls[str(recompute)] = ledger.entries()["ep", "all-to-all"].calls
    return calls, len(ledger.by_axis())


def any_routing() -> int:
    """Random, skewed routings of few tokens; returns how many were tried."""
    mesh = Mesh.create(EP[4], CPU)
    rank, ranks = mesh.coordinate("ep"), mesh.degree("ep")
    whole = whole_moe(ROUTERS["softmax"], bias=True)
    moe, layouts = split_moe(whole, mesh)
    tried = 0

    # All ranks draw the same examples, and none are tried again on the one that failed.
    @settings(
        derandomize=True,
        database=None,
        max_examples=40,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        tokens=st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks),
        favourites=st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=3),
        skew=st.sampled_from([0.0, 3.0, 50.0]),
        active=st.sampled_from([1, 2, 4, EXPERTS]),
        seed=st.integers(0, 2**31),
    )
    def check(
        tokens: list[int], favourites: list[int], skew: float, active: int, seed: int
    ) -> None:
        nonlocal tried
        tried += 1
        generator = torch.Generator().manual_seed(seed)
        total = sum(tokens)
        scores = torch.rand(total, EXPERTS, generator=generator)
        scores[:, favourites] += skew
        expert = scores.topk(active, dim=-1).indices
        weight = torch.rand(total, active, generator=generator)
        x, dy = torch.randn(2, total, DIM, generator=generator)
        start = sum(tokens[:rank])
        own = slice(start, start + tokens[rank])
        expected = dispatched(whole, x, dy, expert, weight)
        seen = dispatched(moe, x[own], dy[own], expert[own], weight[own])
        for name in ("y", "dx", "dweight"):
            torch.testing.assert_close(seen[name], expected[name][own], rtol=0, atol=0)
        for name, parameter in moe.experts.named_parameters():
            theirs = part(expected[name], f"moe.experts.{name}", layouts, mesh)
            torch.testing.assert_close(seen[name], theirs, rtol=0, atol=0, msg=name)
            assert parameter.shape == theirs.shape

    check()
    return tried


def dispatched(
    moe: MoE, x: Tensor, dy: Tensor, expert: Tensor, weight: Tensor
) -> dict[str, Tensor]:
    """The dispatch alone, for a routing of one's own."""
    moe.zero_grad()
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    routing = Routing(expert, weight, counts_of(expert.flatten(), EXPERTS))
    y = moe.dispatch(x, routing, moe.experts)
    y.backward(dy)
    gradients = {name: p.grad.clone() for name, p in moe.experts.named_parameters()}
    return gradients | {"y": y.detach(), "dx": x.grad, "dweight": weight.grad}


@torch.no_grad()
def same_tokens_everywhere() -> dict[str, float]:
    """Worst relative error of inference, where every rank holds all tokens."""
    errors = {}
    for name, parallel in {
        "ep4": EP[4],
        "ep2": EP[2],
        "tp2, ep2, expert_tp2": Parallel(dp_shard=2, tp=2, ep=2, expert_tp=2),
        "tp4, ep4": Parallel(tp=4, dp_shard=1, ep=4),
    }.items():
        mesh = Mesh.create(parallel, CPU)
        whole = whole_moe(ROUTERS["sigmoid"], bias=True).eval()
        moe, _ = split_moe(whole, mesh)
        x, _ = batch(torch.float32)
        for tokens in (x, x[:1, :1], x[:1, :5]):
            y = moe.eval()(tokens)
            errors[name] = max(errors.get(name, 0), relative(y, whole(tokens)))
    return errors


def cut_experts() -> dict[str, float]:
    """Worst relative errors where tp splits tokens and, with expert_tp, experts."""
    errors = {}
    for name, parallel in {
        "ep2, expert_tp2": Parallel(dp_shard=2, tp=2, ep=2, expert_tp=2),
        "expert_tp2": Parallel(dp_shard=2, tp=2, expert_tp=2),
        "expert_tp4": Parallel(dp_shard=1, tp=4, expert_tp=4),
        "tp2, ep4": Parallel(dp_shard=2, tp=2, ep=4),
        "tp2, ep2": Parallel(dp_shard=2, tp=2, ep=2),
        "ep2, fsdp2": Parallel(dp_shard=4, ep=2),
        "cp2, ep4": Parallel(dp_shard=2, cp=2, ep=4),
    }.items():
        mesh = Mesh.create(parallel, CPU)
        whole = whole_moe(RouterConfig(sequence_loss=0.1, z_loss=0.01), bias=True)
        moe, layouts = split_moe(whole, mesh)
        x, dy = batch(torch.float32)
        expected = run(whole, x, dy)
        rows = dealt(mesh, "dp_shard")
        length = LENGTH // (mesh.degree("cp") * mesh.degree("tp"))
        first = length * (mesh.coordinate("cp") * mesh.degree("tp") + mesh.coordinate("tp"))
        own = rows, slice(first, first + length)
        seen = run(moe, x[own], dy[own])
        found = [relative(seen.y, expected.y[own]), relative(seen.dx, expected.dx[own])]
        for weight, gradient in seen.weights.items():
            layout = layouts[f"moe.experts.{weight}"]
            assert layout.view == "expert"
            total = mesh.sum_over(gradient, ["expert_fsdp", *layout.partial])
            theirs = part(expected.weights[weight], f"moe.experts.{weight}", layouts, mesh)
            found.append(relative(total, theirs))
        counts = mesh.sum_over(seen.counts, ["dp_shard", "cp", "tp"])
        assert torch.equal(counts, expected.counts)
        errors[name] = max(found)
    return errors


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def everything() -> dict[str, Any]:
    """One start of ranks serves all claims."""
    return {
        "bits": bits(),
        "wrong order": wrong_order(),
        "calls": calls_when_recomputed(),
        "fuzz": any_routing(),
        "same tokens": same_tokens_everywhere(),
        "cut": cut_experts(),
    }


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return run_ranks(everything, 4)


def test_outputs_and_gradients_are_those_of_one_process_bit_for_bit(
    seen: list[dict[str, Any]],
) -> None:
    """In one process, and for ep 2 and 4: the same tokens in the same order, one thread each."""
    for found in seen:
        assert len(found["bits"]) == 16
        for ep, score, dtype, wrong, counts_equal in found["bits"]:
            assert wrong == [], f"ep {ep}, {score}, {dtype}"
            assert counts_equal


def test_another_order_of_rows_changes_weight_gradients(seen: list[dict[str, Any]]) -> None:
    """So the test above has teeth."""
    differing = {name for found in seen for name in found["wrong order"]}
    assert differing == {"gate", "up", "down"}


def test_counts_are_exchanged_once_though_blocks_are_run_twice(
    seen: list[dict[str, Any]],
) -> None:
    for found in seen:
        # Counts, rows there and back, and their gradients; then rows there and back once more.
        assert found["calls"] == ({"False": 5, "True": 7}, 1)


def test_any_routing_gives_the_bits_of_one_process(seen: list[dict[str, Any]]) -> None:
    """Also ranks without tokens, experts without rows, all tokens to one expert."""
    assert all(found["fuzz"] == 40 for found in seen)


def test_ranks_may_all_hold_the_same_tokens(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        assert max(found["same tokens"].values()) <= 1e-6, found["same tokens"]


def test_experts_may_be_cut_and_their_tokens_lie_anywhere(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        assert max(found["cut"].values()) <= 2e-6, found["cut"]


def test_one_process_dispatches_locally() -> None:
    moe, layouts = split_moe(whole_moe(RouterConfig()), Mesh.create(Parallel(), CPU))
    assert moe.dispatch is dispatch_locally and moe.sequence_sum is None
    assert layouts["moe.experts.gate"].view == "expert"
    assert layouts["moe.router.weight"].view == "dense"


def test_an_imagined_rank_cuts_its_experts() -> None:
    mesh = Mesh.imagined(Parallel(dp_shard=8, tp=2, ep=4, expert_tp=2), 16, 5)
    model = nn.ModuleDict({"moe": whole_moe(RouterConfig(), bias=True).to("meta")})
    layouts = Layouts.of(model)
    split_experts(model, mesh, layouts)
    shapes = {name: tuple(p.shape) for name, p in model["moe"].experts.named_parameters()}
    assert shapes == {
        "gate": (2, 32, 32), "up": (2, 32, 32), "down": (2, 32, 32),
        "gate_bias": (2, 32), "up_bias": (2, 32), "down_bias": (2, 32),
    }  # fmt: skip
    assert layouts["moe.experts.down"].splits == (("ep", 0), ("expert_tp", 2))
    assert layouts["moe.experts.down_bias"].partial == ("expert_tp",)
