"""Latent attention against the paper's equations, one head and one query at a time."""

from __future__ import annotations

import pytest
import torch

from armillary.models.layers.mla import LatentAttention
from armillary.models.layers.rope import Rope

B, S, D, H = 2, 12, 16, 3
PLAIN, ROTATED, VALUE, RANK = 6, 4, 5, 8


def attention_of(query_rank: int | None, backend: str) -> LatentAttention:
    torch.set_num_threads(1)
    attention = LatentAttention(
        D,
        n_heads=H,
        query_rank=query_rank,
        key_value_rank=RANK,
        plain_head_dim=PLAIN,
        rope_head_dim=ROTATED,
        value_head_dim=VALUE,
        norm_eps=1e-6,
        std=0.02,
        output_std=0.02,
        backend=backend,
        score_factor=1.3,
    ).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in attention.named_parameters():
            around = 1.0 if "norm" in name else 0.0
            parameter.copy_(around + 0.5 * torch.randn(parameter.shape, generator=generator))
    return attention


def normed(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain


def turned(x: torch.Tensor, position: int) -> torch.Tensor:
    """x `[P_rope]` rotated: pair i is (x[i], x[i + P/2])."""
    half = len(x) // 2
    angles = position * 10_000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    cos, sin = angles.cos().double(), angles.sin().double()
    return torch.cat((x[:half] * cos - x[half:] * sin, x[half:] * cos + x[:half] * sin))


def oracle(attention: LatentAttention, x: torch.Tensor) -> torch.Tensor:
    latent = x
    if attention.query_latent is not None and attention.query_norm is not None:
        latent = normed(x @ attention.query_latent.weight.T, attention.query_norm.weight)
    queries = latent @ attention.query.weight.T
    both = x @ attention.key_value_latent.weight.T
    shared = both[..., RANK:]
    expanded = normed(both[..., :RANK], attention.key_value_norm.weight)
    expanded = expanded @ attention.key_value.weight.T
    rows = []
    for b in range(B):
        outs = []
        for t in range(S):
            heads = []
            for h in range(H):
                q = queries[b, t].view(H, PLAIN + ROTATED)[h]
                q = torch.cat((q[:PLAIN], turned(q[PLAIN:], t)))
                own = [expanded[b, s].view(H, PLAIN + VALUE)[h] for s in range(t + 1)]
                k = [torch.cat((own[s][:PLAIN], turned(shared[b, s], s))) for s in range(t + 1)]
                scores = torch.stack([q @ key for key in k]) * 1.3 / (PLAIN + ROTATED) ** 0.5
                weights = scores.softmax(0)
                heads.append(sum(w * o[PLAIN:] for w, o in zip(weights, own, strict=True)))
            outs.append(torch.cat(heads) @ attention.output.weight.T)
        rows.append(torch.stack(outs))
    return torch.stack(rows)


@pytest.mark.parametrize("backend", ["blocked", "sdpa"])
@pytest.mark.parametrize("query_rank", [None, 7])
def test_outputs_and_gradients_are_those_of_the_papers_equations(
    backend: str, query_rank: int | None
) -> None:
    ours, explicit = (attention_of(query_rank, backend) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    x, weights = (torch.randn(B, S, D, generator=generator, dtype=torch.float64) for _ in range(2))
    rope = Rope(head_dim=ROTATED, theta=10_000.0).tables(torch.arange(S))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outs = [ours(inputs[0], rope, None), oracle(explicit, inputs[1])]
    for out in outs:
        (out * weights).sum().backward()
    assert (outs[0] - outs[1]).abs().max() <= 1e-12
    assert (inputs[0].grad - inputs[1].grad).abs().max() <= 1e-12
    for (name, one), other in zip(ours.named_parameters(), explicit.parameters(), strict=True):
        assert one.grad is not None, name
        assert (one.grad - other.grad).abs().max() <= 1e-11, name


def test_what_is_split_over_heads_is_declared() -> None:
    attention = attention_of(7, "sdpa")
    assert attention.tensor_region
    sizes = {name: attention.get_submodule(name).weight.shape for name in attention.tensor_split}
    assert sizes == {
        "query": (H * (PLAIN + ROTATED), 7), "key_value": (H * (PLAIN + VALUE), RANK),
        "output": (D, H * VALUE),
    }  # fmt: skip
