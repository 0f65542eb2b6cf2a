"""Which experts are chosen, with what weight, and how losses and biases even out their loads."""

from __future__ import annotations

import pytest
import torch

from armillary.models.layers.balance import move_bias
from armillary.models.layers.router import Router, largest, sequence_balance_loss
from armillary.models.routing import RouterConfig

B, S, D, E, K = 3, 16, 8, 12, 3


def router_of(config: RouterConfig, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Router:
    router = Router(D, n_experts=E, n_active=K, std=0.02, config=config).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return router


def hidden(seed: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(B, S, D, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_equal_scores_are_taken_by_index() -> None:
    scores = torch.tensor([[0.5, 1.0, 1.0, 0.5, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert largest(scores, 3).tolist() == [[1, 2, 4], [0, 1, 2]]
    assert largest(scores, 4).tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_weights_are_the_scores_of_the_best_experts(score: str, normalize: bool) -> None:
    config = RouterConfig(score=score, normalize=normalize, scale=2.5, bias=True)
    router, x = router_of(config), hidden()
    expert, weight, counts = router(x)
    logits = x.flatten(0, 1) @ router.weight.T + router.bias
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    best = scores.topk(K)
    expected = best.values / best.values.sum(-1, keepdim=True) if normalize else best.values
    assert torch.equal(expert, best.indices)
    torch.testing.assert_close(weight, 2.5 * expected, rtol=1e-14, atol=0)
    assert torch.equal(counts, torch.bincount(expert.flatten(), minlength=E))


def test_a_normalised_softmax_is_the_softmax_over_the_chosen_logits() -> None:
    router, x = router_of(RouterConfig()), hidden()
    expert, weight, _ = router(x)
    logits = x.flatten(0, 1) @ router.weight.T
    torch.testing.assert_close(weight, logits.gather(1, expert).softmax(-1), rtol=1e-13, atol=0)


@pytest.mark.parametrize("group_score", ["top-2", "max"])
def test_experts_come_from_the_best_groups_only(group_score: str) -> None:
    config = RouterConfig(
        score="sigmoid", n_groups=4, n_top_groups=2, group_score=group_score, balance_rate=1e-3
    )
    router = router_of(config)
    assert router.expert_bias is not None
    router.expert_bias.copy_(torch.linspace(-0.3, 0.3, E))
    scores = torch.rand(200, E, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    chosen = router.choose(scores)
    biased = (scores + router.expert_bias).tolist()
    for row, experts in zip(biased, chosen.tolist(), strict=True):
        groups = [sorted(row[3 * g : 3 * g + 3], reverse=True) for g in range(4)]
        value = [group[0] if group_score == "max" else group[0] + group[1] for group in groups]
        allowed = sorted(range(4), key=lambda g: -value[g])[:2]
        eligible = [e for e in range(E) if e // 3 in allowed]
        assert experts == sorted(eligible, key=lambda e: -row[e])[:K]


def test_the_selection_bias_chooses_and_does_not_weigh() -> None:
    plain = router_of(RouterConfig(score="sigmoid", normalize=False))
    biased = router_of(RouterConfig(score="sigmoid", normalize=False, balance_rate=1e-3))
    x = hidden()
    assert biased.expert_bias is not None
    biased.expert_bias[5] = 10.0  # everyone takes expert 5 first
    expert, weight, _ = biased(x)
    assert (expert[:, 0] == 5).all()
    scores = (x.flatten(0, 1) @ plain.weight.T).sigmoid()
    torch.testing.assert_close(weight[:, 0], scores[:, 5], rtol=1e-14, atol=0)
    assert "expert_bias" in biased.state_dict()
    assert "expert_bias" not in plain.state_dict()


def test_scores_are_exact_whatever_the_format_of_the_residual_stream() -> None:
    router = router_of(RouterConfig(), dtype=torch.float32)
    x = hidden(dtype=torch.float32).bfloat16()
    weight = router(x).weight
    logits = x.float().flatten(0, 1) @ router.weight.bfloat16().float().T
    assert weight.dtype == torch.float32
    expected = logits.softmax(-1).topk(K).values
    torch.testing.assert_close(weight, expected / expected.sum(-1, keepdim=True))


def test_bias_moves_towards_even_loads_and_keeps_its_mean_at_zero() -> None:
    bias = torch.zeros(4)
    move_bias(bias, torch.tensor([10, 2, 6, 6]), rate=0.1)  # mean 6
    torch.testing.assert_close(bias, torch.tensor([-0.1, 0.1, 0.0, 0.0]), rtol=0, atol=1e-8)
    move_bias(bias, torch.tensor([24, 0, 0, 0]), rate=0.1)
    expected = torch.tensor([-0.25, 0.15, 0.05, 0.05])
    torch.testing.assert_close(bias, expected, rtol=0, atol=1e-7)
    move_bias(bias, torch.zeros(4, dtype=torch.int64), rate=0.1)  # no tokens, no move
    torch.testing.assert_close(bias, expected, rtol=0, atol=1e-7)


def gradients(config: RouterConfig, parts: list[torch.Tensor], **options: object) -> torch.Tensor:
    router = router_of(config).train()
    for part in parts:
        weight = router(part, **options).weight
        (weight * 0).sum().backward()  # what is left is the auxiliary losses' gradient
    assert router.weight.grad is not None
    return router.weight.grad


LOSSES = {
    "sequence": RouterConfig(score="sigmoid", sequence_loss=0.1),
    "z": RouterConfig(z_loss=0.1),
    "both": RouterConfig(z_loss=0.2, sequence_loss=0.3),
}


@pytest.mark.parametrize("config", LOSSES.values(), ids=LOSSES)
def test_auxiliary_gradients_do_not_depend_on_accumulation(config: RouterConfig) -> None:
    x = torch.randn(4, S, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    whole = gradients(config, [x])
    assert whole.abs().max() > 1e-3
    torch.testing.assert_close(gradients(config, list(x.split(1))), whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("config", LOSSES.values(), ids=LOSSES)
def test_auxiliary_gradients_do_not_depend_on_who_holds_which_tokens(config: RouterConfig) -> None:
    x = hidden()
    whole = gradients(config, [x])
    counts = [router_of(config).eval()(row[None]).counts for row in x]
    of_rows = torch.stack(counts)  # what the ranks of a row would sum
    halves = list(x.split(S // 2, dim=1))
    parts = gradients(config, halves, sequence_sum=lambda _: of_rows)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-14)


def test_auxiliary_losses_are_the_papers_formulas() -> None:
    config = RouterConfig(score="sigmoid", sequence_loss=1.0, z_loss=0.5)
    x = hidden()
    router = router_of(config).train()
    (router(x).weight * 0).sum().backward()
    oracle = router_of(config)
    loss = torch.zeros((), dtype=torch.float64)
    for row in x:
        logits = row @ oracle.weight.T
        scores = logits.sigmoid()
        share = scores / scores.sum(-1, keepdim=True)
        chosen = torch.zeros(S, E, dtype=torch.float64).scatter_(1, scores.topk(K).indices, 1)
        f = E / (K * S) * chosen.sum(0)
        loss = loss + S * (f * share.mean(0)).sum() + 0.5 * logits.exp().sum(-1).log().pow(2).sum()
    loss.backward()
    torch.testing.assert_close(router.weight.grad, oracle.weight.grad, rtol=1e-12, atol=1e-13)
    even = torch.full((1, E), S * K // E)
    scores = torch.rand(1, S, E)
    assert sequence_balance_loss(scores, even).item() == pytest.approx(S, rel=1e-6)


def test_auxiliary_losses_act_in_training_only() -> None:
    router, x = router_of(LOSSES["both"]), hidden()
    weight = router.eval()(x).weight
    (weight * 0).sum().backward()
    assert router.weight.grad is not None
    assert router.weight.grad.abs().max() == 0


def test_inconsistent_routers_are_refused_all_at_once() -> None:
    assert RouterConfig(n_groups=4, n_top_groups=2).problems(8, 2) == []
    assert len(RouterConfig(scale=0.0, z_loss=-1.0, n_groups=3).problems(8, 2)) == 3
    too_few = RouterConfig(n_groups=4, n_top_groups=1).problems(8, 4)
    assert [p.allowed for p in too_few] == ["2 to 4"]
    assert len(RouterConfig(n_groups=8, n_top_groups=2).problems(8, 2)) == 1  # groups of one
