"""Published sizes: parameters to the last one, FLOPs against published anchors, and the limits."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from armillary.foundation.errors import UserError
from armillary.models import Llama, Llama31RopeScaling, Qwen3, llama3, qwen3
from armillary.models.dense import DenseDecoder
from armillary.models.llama import LLAMA_SIZES
from armillary.models.qwen3 import QWEN3_SIZES

# vocabulary, D, L, H, K, P, F, tied, QK-norm, parameters: as on the model cards
PUBLISHED = {
    "llama 1B": (128256, 2048, 16, 32, 8, 64, 8192, True, False, 1_235_814_400),
    "llama 3B": (128256, 3072, 28, 24, 8, 128, 8192, True, False, 3_212_749_824),
    "llama 8B": (128256, 4096, 32, 32, 8, 128, 14336, False, False, 8_030_261_248),
    "llama 70B": (128256, 8192, 80, 64, 8, 128, 28672, False, False, 70_553_706_496),
    "llama 405B": (128256, 16384, 126, 128, 8, 128, 53248, False, False, 405_853_388_800),
    "qwen3 0.6B": (151936, 1024, 28, 16, 8, 128, 3072, True, True, 596_049_920),
    "qwen3 1.7B": (151936, 2048, 28, 16, 8, 128, 6144, True, True, 1_720_574_976),
    "qwen3 4B": (151936, 2560, 36, 32, 8, 128, 9728, True, True, 4_022_468_096),
    "qwen3 8B": (151936, 4096, 36, 32, 8, 128, 12288, False, True, 8_190_735_360),
    "qwen3 14B": (151936, 5120, 40, 40, 8, 128, 17408, False, True, 14_768_307_200),
    "qwen3 32B": (151936, 5120, 64, 64, 8, 128, 25600, False, True, 32_762_123_264),
}


def named(name: str) -> DenseDecoder:
    family, size = name.split()
    return llama3(size) if family == "llama" else qwen3(size)


def parameters_by_hand(name: str) -> int:
    vocab, d, layers, h, k, p, f, tied, qk_norm, _ = PUBLISHED[name]
    attention = d * h * p + 2 * d * k * p + h * p * d + (2 * p if qk_norm else 0)
    block = attention + 3 * d * f + 2 * d
    return vocab * d * (1 if tied else 2) + layers * block + d


def test_the_table_of_published_sizes_is_complete() -> None:
    ours = {f"llama {size}" for size in LLAMA_SIZES} | {f"qwen3 {size}" for size in QWEN3_SIZES}
    assert ours - {"llama debug", "qwen3 debug"} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_size_has_its_published_number_of_parameters(name: str) -> None:
    config, expected = named(name), PUBLISHED[name][-1]
    with torch.device("meta"):
        model = config.build()
    built = sum(parameter.numel() for parameter in model.parameters())
    assert (parameters_by_hand(name), config.parameter_count(), built) == (expected,) * 3
    assert set(model.initializers()) == dict(model.named_parameters()).keys()


def test_releases_differ_in_rotary_scaling_and_context_only() -> None:
    assert llama3("8B").rope_scaling is None
    assert llama3("8B").max_seq_len == 8192
    assert llama3("8B", release="3.1").rope_scaling == Llama31RopeScaling(factor=8.0)
    assert llama3("405B").rope_scaling == Llama31RopeScaling(factor=8.0)
    assert llama3("1B").rope_scaling == Llama31RopeScaling(factor=32.0)
    assert llama3("3B").max_seq_len == 131_072


def test_an_unknown_size_is_refused_with_the_nearest_and_the_allowed() -> None:
    with pytest.raises(UserError, match=r"llama3 has no size '7B'.*\n.*1B, 3B, 8B, 70B, 405B"):
        llama3("7B")
    with pytest.raises(UserError, match=r"release '3.2'(.|\n)*8B in 3, 8B in 3.1"):
        llama3("8B", release="3.2")
    with pytest.raises(UserError, match=r'try: qwen3\("0.6B"\)'):
        qwen3("0.6b")


def test_llama_3_8b_costs_what_is_published_in_both_conventions() -> None:
    config = llama3("8B")  # 6 (N - embedding - norms) + 12 L H P S, or 6 L H P S
    assert config.flops_per_token(8192, causal=False) == 57_912_852_480
    assert config.flops_per_token(8192, causal=True) == 51_470_401_536


def test_fewer_kv_heads_make_projections_cheaper_and_scores_not() -> None:
    grouped, full = (
        Llama(n_heads=8, n_kv_heads=kv).flops_breakdown(512, causal=True) for kv in (2, 8)
    )
    assert grouped["attention.scores"] == full["attention.scores"]
    assert grouped["attention.projections"] / full["attention.projections"] == 10 / 16


@pytest.mark.parametrize("tied", [False, True])
def test_flops_equal_what_torch_counts_operator_by_operator(tied: bool) -> None:
    config = Llama(
        vocab_size=96, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=48,
        tied_embeddings=tied, attention="sdpa",
    )  # fmt: skip
    model, tokens = config.build(), torch.zeros(2, 24, dtype=torch.int64)
    math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with math, FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    expected = config.flops_per_token(24, causal=False) * tokens.numel()
    assert counter.get_total_flops() == expected


def test_all_inconsistent_sizes_are_reported_at_once() -> None:
    config = Llama(
        dim=100, n_heads=8, n_kv_heads=3, ffn_dim=0, max_seq_len=64,
        rope_scaling=Llama31RopeScaling(low_frequency_factor=4.0),
    )  # fmt: skip
    text = "\n".join(problem.render() for problem in config.problems(128))
    for part in (
        "model.ffn_dim = 0 is not positive",
        "model.n_kv_heads = 3 does not divide model.n_heads = 8",
        "allowed: 1, 2, 4, 8",
        "model.n_heads = 8 does not divide model.dim = 100",
        "budget.seq_len = 128 is above model.max_seq_len = 64",
        "model.rope_scaling",
    ):
        assert part in text
    assert "cannot be rotated" in Llama(head_dim=7).problems(8)[0].message
    assert Llama().problems(8192) == []
    assert Qwen3().problems(40_960) == []
