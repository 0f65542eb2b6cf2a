"""Mixtures of experts against a loop over tokens, and what they count."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from armillary.models.layers.balance import STATISTICS
from armillary.models.layers.dispatch import sorted_slots
from armillary.models.layers.end_step import Total, end_step, layers_that_end_steps
from armillary.models.layers.experts import Experts, clamped_swiglu
from armillary.models.layers.mlp import SwiGLU
from armillary.models.layers.moe import MoE
from armillary.models.layers.recompute import recompute_contexts, recomputing
from armillary.models.layers.router import Router
from armillary.models.routing import RouterConfig

B, S, D, F, E, K = 2, 24, 16, 24, 6, 2
BALANCED = RouterConfig(score="sigmoid", balance_rate=0.01)


def moe_of(
    config: RouterConfig,
    *,
    dtype: torch.dtype = torch.float64,
    shared: bool = True,
    bias: bool = False,
    seed: int = 0,
) -> MoE:
    torch.set_num_threads(1)
    router = Router(D, n_experts=E, n_active=K, std=0.02, config=config)
    activation = {"activation": clamped_swiglu} if bias else {}
    experts = Experts(D, F, n_experts=E, std=0.02, output_std=0.02, bias=bias, **activation)
    extra = SwiGLU(D, F, std=0.02, output_std=0.02) if shared else None
    moe = MoE(router=router, experts=experts, shared=extra).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return moe


def ended(model: torch.nn.Module, total: Total = lambda counts: counts) -> dict[str, float]:
    """What layers report of a step."""
    layers = layers_that_end_steps(model.modules())
    found = end_step(layers, total, STATISTICS, torch.device("cpu")).tolist()
    return dict(zip(STATISTICS, found, strict=True))


def by_token(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    """The same, one token and expert after the other."""
    routing, experts, rows = moe.router(x), moe.experts, x.flatten(0, 1)
    out = []
    for token, chosen, weights in zip(rows, routing.expert.tolist(), routing.weight, strict=True):
        total = torch.zeros_like(token)
        for expert, weight in zip(chosen, weights, strict=True):
            gate, up = experts.gate[expert] @ token, experts.up[expert] @ token
            if experts.gate_bias is None:
                hidden = gate * torch.sigmoid(gate) * up
                y = experts.down[expert] @ hidden
            else:
                gate, up = gate + experts.gate_bias[expert], up + experts.up_bias[expert]
                gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
                hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
                y = experts.down[expert] @ hidden + experts.down_bias[expert]
            total = total + weight * y
        out.append(total)
    y = torch.stack(out).view_as(x)
    return y if moe.shared is None else y + moe.shared(x)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
def test_outputs_and_gradients_equal_a_loop_over_tokens(
    dtype: torch.dtype, close: float, bias: bool
) -> None:
    config = RouterConfig(scale=1.5, bias=bias)
    ours, oracle = (moe_of(config, dtype=dtype, bias=bias, shared=not bias) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, S, D, generator=generator, dtype=torch.float64).to(dtype)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outs = [ours(inputs[0]), by_token(oracle, inputs[1])]
    weights = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(dtype)
    for out in outs:
        (out * weights).sum().backward()
    pairs = [(outs[0], outs[1]), (inputs[0].grad, inputs[1].grad)]
    for (name, one), other in zip(ours.named_parameters(), oracle.parameters(), strict=True):
        assert one.grad is not None, name
        pairs.append((one.grad, other.grad))
    for one, other in pairs:
        assert (one - other).abs().max() <= close * other.abs().max().clamp(min=1)


def test_bfloat16_runs_in_its_own_format_with_fp32_masters() -> None:
    exact, rounded = moe_of(RouterConfig()), moe_of(RouterConfig(), dtype=torch.float32)
    x = torch.randn(B, S, D, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = rounded(x)
    out.float().square().sum().backward()
    assert out.dtype == torch.bfloat16
    assert {p.grad.dtype for p in rounded.parameters()} == {torch.float32}
    expected = exact(x.double())
    assert (out.double() - expected).norm() / expected.norm() < 2**-6


def test_slots_are_sorted_stably_and_the_way_back_is_exact() -> None:
    expert = torch.tensor([[2, 0], [0, 2], [1, 0]])
    slots = sorted_slots(expert)
    assert slots.order.tolist() == [1, 2, 5, 4, 0, 3]
    assert torch.equal(slots.order[slots.inverse], torch.arange(6))


def test_two_runs_give_the_same_bits() -> None:
    x = torch.randn(B, S, D, generator=torch.Generator().manual_seed(1))
    grads = []
    for _ in range(2):
        moe = moe_of(RouterConfig(z_loss=0.1, sequence_loss=0.1), dtype=torch.float32)
        moe(x).square().sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in moe.parameters()]))
    assert torch.equal(grads[0], grads[1])


def test_experts_without_tokens_get_zeros_for_gradients() -> None:
    moe = moe_of(RouterConfig(bias=True), bias=True, shared=False)
    with torch.no_grad():
        moe.router.bias[:2] = -1e4  # nobody takes the first two
    moe(torch.randn(B, S, D, dtype=torch.float64)).square().sum().backward()
    for parameter in moe.experts.parameters():
        assert parameter.grad is not None
        assert parameter.grad[:2].abs().max() == 0
        assert parameter.grad[2:].abs().max() > 0


def test_counts_are_of_training_tokens_once_whatever_is_recomputed_or_accumulated() -> None:
    moe = moe_of(BALANCED, dtype=torch.float32)
    seen = []
    moe.register_forward_pre_hook(lambda *_: seen.append(recomputing()))
    x = torch.randn(4, S, D, generator=torch.Generator().manual_seed(1))
    expected = moe.eval().router(x).counts
    moe(x)  # validation
    moe.train()
    with torch.no_grad():
        moe(x)
    seen.clear()
    for part in x.split(1):
        row = part.clone().requires_grad_()
        out = checkpoint(moe, row, use_reentrant=False, context_fn=recompute_contexts)
        out.sum().backward()
    assert seen == [False, True] * 4
    assert torch.equal(moe.take_counts(), expected)
    assert torch.equal(moe.take_counts(), torch.zeros_like(expected))


def test_the_bias_drives_a_skewed_router_to_even_loads() -> None:
    moe = moe_of(BALANCED, dtype=torch.float32, shared=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        moe.router.weight.mul_(0.2)
    common = moe.router.weight[0].detach() * 8  # all tokens lean towards expert 0
    figures = []
    for _ in range(150):
        moe(torch.randn(8, 32, D, generator=generator) + common)
        figures.append(ended(moe))
    assert figures[0]["expert_load_max_over_mean"] > 2.5
    tail = [step["expert_load_max_over_mean"] for step in figures[-20:]]
    assert max(tail) < 1.35
    bias = moe.router.expert_bias
    assert bias is not None
    assert abs(bias.mean()) < 1e-7
    assert figures[-1]["expert_bias_mean_absolute"] == pytest.approx(bias.abs().mean().item())
    assert figures[-1]["expert_idle_share"] == 0.0


def test_one_sum_serves_all_layers_and_adds_up_what_other_ranks_saw() -> None:
    model = torch.nn.ModuleList(
        [moe_of(BALANCED, dtype=torch.float32, seed=seed) for seed in range(3)]
    )
    x = torch.randn(B, S, D, generator=torch.Generator().manual_seed(1))
    calls: list[torch.Tensor] = []

    def total(counts: torch.Tensor) -> torch.Tensor:
        calls.append(counts)
        return torch.cat([torch.tensor([0, 0, 0, 0, 0, 1000]), counts[E:]])

    for moe in model:
        moe(x)
    figures = ended(model, total)
    assert [call.sum().item() for call in calls] == [3 * B * S * K]
    assert figures["expert_load_max_over_mean"] == E
    assert figures["expert_idle_share"] == pytest.approx(5 / 6)
    bias = model[0].router.expert_bias
    assert bias.argmin() == 5
    assert set(ended(torch.nn.Linear(2, 2), total).values()) == {-math.inf}
    assert len(calls) == 1
    unbiased = ended(torch.nn.ModuleList([moe_of(RouterConfig())]))
    absent = {name for name, figure in unbiased.items() if figure == -math.inf}
    assert absent == {"expert_bias_mean_absolute"}
