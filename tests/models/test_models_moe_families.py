"""What holds for every family with experts: documents, caches, backends, counts and limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from armillary.models import YarnRopeScaling, deepseek, gpt_oss, qwen3_moe
from armillary.models.layers.backends import BACKENDS, AttentionBackend
from armillary.models.layers.cache import KeyValueCache
from armillary.models.layers.documents import Documents
from armillary.models.layers.experts import Experts
from armillary.models.moe import MoEDecoder
from model_cases import random_tokens
from moe_cases import MOE_FAMILIES, build_moe


def row_by_row(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """A grouped product whose rounding does not depend on how many rows an expert has."""
    expert = torch.bucketize(torch.arange(len(x), dtype=torch.int32), ends, right=True)
    return (weight[expert] * x[:, None]).sum(-1)


@pytest.mark.parametrize("family", MOE_FAMILIES)
@pytest.mark.parametrize("attention", ["blocked", "sdpa"])
@torch.no_grad()
def test_documents_cannot_see_each_other(family: str, attention: str) -> None:
    model = build_moe(MOE_FAMILIES[family], attention=attention)
    for module in model.modules():
        if isinstance(module, Experts):
            module.product = row_by_row
    documents = Documents.from_lengths([[40, 31, 57], [64, 64]])
    tokens = random_tokens(2, 128)
    before = model(tokens, documents)
    changed = tokens.clone()
    changed[0, 40:71] = (changed[0, 40:71] + 7) % 61
    after = model(changed, documents)
    difference = (after - before).abs().amax(-1)
    assert difference[0, :40].max() == 0
    assert difference[0, 71:].max() == 0
    assert difference[1].max() == 0
    assert difference[0, 40:71].min() > 0


@pytest.mark.parametrize("family", MOE_FAMILIES)
@torch.no_grad()
def test_cached_logits_equal_those_of_the_whole_sequence(family: str) -> None:
    model = build_moe(MOE_FAMILIES[family])
    tokens = random_tokens(2, 60)
    documents = Documents.from_lengths([[25, 35], [3, 57]])
    whole = model(tokens, documents)
    cache = KeyValueCache(60)
    first = Documents.from_lengths([[25, 15], [3, 37]])
    parts = [model(tokens[:, :40], first, cache=cache)]
    parts += [model(tokens[:, i : i + 1], cache=cache) for i in range(40, 60)]
    assert (torch.cat(parts, dim=1) - whole).abs().max() <= 1e-5


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_backends_agree_on_logits_and_gradients(family: str) -> None:
    documents, tokens = Documents.from_lengths([[40, 31, 57], [128]]), random_tokens(2, 128)
    logits, grads = {}, {}
    for attention in ("blocked", "sdpa"):
        model = build_moe(MOE_FAMILIES[family], attention=attention)
        logits[attention] = model(tokens, documents)
        logits[attention].square().sum().backward()
        grads[attention] = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close(logits["blocked"], logits["sdpa"], rtol=0, atol=2e-5)
    with torch.no_grad():
        flex = build_moe(MOE_FAMILIES[family], attention="flex").eval()(tokens, documents)
    torch.testing.assert_close(flex, logits["sdpa"], rtol=0, atol=2e-5)
    for name, grad in grads["blocked"].items():
        other = grads["sdpa"][name]
        assert grad is not None, name
        assert (grad - other).abs().max() <= 1e-4 * other.abs().max().clamp(min=1e-3), name


def test_one_mask_serves_all_heads_whatever_their_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = []

    def seen(*tensors: torch.Tensor, attn_mask: torch.Tensor, **options: object) -> torch.Tensor:
        masks.append(attn_mask)
        return attention(*tensors, attn_mask=attn_mask, **options)

    attention = torch.nn.functional.scaled_dot_product_attention
    model = build_moe(MOE_FAMILIES["gpt-oss"], attention="sdpa")
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", seen)
    with torch.no_grad():
        model(random_tokens(2, 30), cache=KeyValueCache(30))
        model(random_tokens(2, 30))
    shapes = [(mask.dtype, mask.squeeze().shape) for mask in masks]
    assert shapes[0] == (torch.bool, (2, 30, 31))  # no heads, and a column for the sink
    assert {shape[-2:] for _, shape in shapes} == {(30, 31)}
    assert len(masks) == 6


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_masks_are_made_for_the_backend_that_reads_them(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []

    def noted(name: str, device_type: str, head_width: int) -> AttentionBackend:
        widths.append(head_width)
        return BACKENDS["blocked"]

    for user in ("decoder", "layers.attention_core"):
        monkeypatch.setattr(f"armillary.models.{user}.backend_for", noted)
    config = MOE_FAMILIES[family]
    build_moe(config)(random_tokens(1, 8))
    assert set(widths) == {config.head_width}
    assert len(widths) > config.n_layers


@torch.no_grad()
def test_a_window_hides_what_lies_before_it() -> None:
    config = replace(MOE_FAMILIES["gpt-oss"], n_layers=1)  # one layer, and that has a window of 20
    model, tokens = build_moe(config), random_tokens(1, 64)
    assert [layer.window for layer in build_moe(MOE_FAMILIES["gpt-oss"]).layers.values()] == [
        20, None, 20,
    ]  # fmt: skip
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 61
    difference = (model(changed) - model(tokens)).abs().amax(-1)[0]
    assert difference[:10].max() == 0
    assert difference[30:].max() == 0
    assert difference[10:30].min() > 0


@torch.no_grad()
def test_sinks_take_weight_from_every_key() -> None:
    model, tokens = build_moe(replace(MOE_FAMILIES["gpt-oss"], n_layers=1)), random_tokens(1, 8)
    attention = model.layers["0"].attention
    seen = []
    attention.core.register_forward_hook(lambda module, inputs, out: seen.append(out))
    for sink in (-1e4, 1e4):
        attention.core.sinks.fill_(sink)
        model(tokens)
    assert seen[0].abs().min() > 0
    assert seen[1].abs().max() == 0  # all weight goes to the sink


@pytest.mark.parametrize("family", [*MOE_FAMILIES, "deepseek ahead"])
def test_counts_equal_the_built_model_and_nothing_asks_the_device(family: str) -> None:
    ahead = replace(MOE_FAMILIES["deepseek v3"], predict_ahead=True)
    config = MOE_FAMILIES.get(family, ahead)
    with torch.device("meta"):  # tensors without values: asking for one is an error
        model = config.build()
    assert sum(p.numel() for p in model.parameters()) == config.parameter_count()
    assert model.initializers().keys() == dict(model.named_parameters()).keys()
    tokens = random_tokens(2, 64).to("meta")
    documents = Documents.from_lengths([[5, 59], [64]]).to("meta")
    sdpa = replace(config, attention="sdpa")
    with torch.device("meta"):
        model = sdpa.build()
    logits = model(tokens, documents)
    logits.sum().backward()
    assert logits.shape == (2, 64, 61)


PUBLISHED = {
    # parameters, and those that a token meets, in billions, as printed by the publication
    "30B-A3B": (qwen3_moe, "30.5", None),  # counts the embedding as active: see below
    "235B-A22B": (qwen3_moe, "235", "22"),
    "16B": (deepseek, "15.7", None),  # 2.4 as printed is 2.45 here
    "236B": (deepseek, "236", "21"),
    "671B": (deepseek, "671", "37"),
    "20B": (gpt_oss, "20.9", "3.6"),
    "120B": (gpt_oss, "116.8", "5.1"),
}


def printed(count: int, like: str) -> str:
    digits = len(like.partition(".")[2])
    return f"{count / 1e9:.{digits}f}"


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_sizes_have_their_published_counts(size: str) -> None:
    make, total, active = PUBLISHED[size]
    config = make(size)
    assert printed(config.parameter_count(), total) == total
    if active is not None:
        assert printed(config.active_parameter_count(), active) == active
    with torch.device("meta"):
        model = config.build()
    assert sum(p.numel() for p in model.parameters()) == config.parameter_count()
    assert config.problems(4096) == []


def test_published_counts_to_the_last_parameter() -> None:
    # The released files of DeepSeek-V3 count 671,026,419,200 with 58 selection biases of 256.
    assert deepseek("671B").parameter_count() == 671_026_419_200 - 58 * 256
    assert qwen3_moe("30B-A3B").parameter_count() == 30_532_122_624
    assert gpt_oss("20B").parameter_count() == 20_914_757_184
    small = qwen3_moe("30B-A3B")
    with_embedding = small.active_parameter_count() + small.vocab_size * small.dim
    assert int(with_embedding / 1e8) == 33  # "3.3B activated", 3.353


def test_flops_are_of_active_experts_and_visible_keys() -> None:
    config = MOE_FAMILIES["qwen3-moe"]
    more = replace(config, n_experts=16)
    assert (
        config.flops_breakdown(64, causal=True)["experts"]
        == more.flops_breakdown(64, causal=True)["experts"]
        == 6 * 3 * 2 * 3 * 32 * 24
    )
    grouped = replace(config, n_kv_heads=1)
    scores = config.flops_breakdown(64, causal=True)["attention.scores"]
    assert grouped.flops_breakdown(64, causal=True)["attention.scores"] == scores
    windowed = MOE_FAMILIES["gpt-oss"]  # layers of 20, all, 20 keys
    for length, causal, keys in ((64, False, 104), (64, True, 32 + 2 * (20 - 400 / 128))):
        flops = windowed.flops_breakdown(length, causal=causal)["attention.scores"]
        assert flops == pytest.approx(12 * 4 * 16 * keys)
    whole = windowed.flops_breakdown(16, causal=True)["attention.scores"]
    assert whole == 12 * 4 * 16 * 3 * 8  # a row shorter than the window
    latent = MOE_FAMILIES["deepseek v3"]
    wide = latent.flops_breakdown(64, causal=False)["attention.scores"]
    assert wide == 3 * 4 * 6 * (16 + 12) * 64
    looking = replace(latent, predict_ahead=True).flops_breakdown(64, causal=False)
    assert looking["attention.scores"] == wide * 4 / 3
    assert looking["head"] == 2 * latent.flops_breakdown(64, causal=False)["head"]


def test_families_say_what_a_degree_must_divide_and_where_they_cannot_be_split() -> None:
    axes = {name: config.divisors() for name, config in MOE_FAMILIES.items()}
    assert axes["qwen3-moe"]["tp"] == {"model.n_heads": 4, "model.n_kv_heads": 2}
    assert axes["deepseek v2"]["tp"] == {
        "model.n_heads": 4, "model.ffn_dim": 48, "model.n_shared_experts * model.expert_dim": 48,
    }  # fmt: skip
    for found in axes.values():
        assert found["ep"] == {"model.n_experts": 8}
        assert found["expert_tp"] == {"model.expert_dim": 24}
    assert MOE_FAMILIES["deepseek v3"].refusals() == {}
    assert set(replace(MOE_FAMILIES["deepseek v3"], predict_ahead=True).refusals()) == {"pp", "cp"}


def test_inconsistent_models_are_refused_all_at_once() -> None:
    def messages(config: MoEDecoder, seq_len: int = 64) -> str:
        return " | ".join(problem.message for problem in config.problems(seq_len))

    assert all(not messages(config) for config in MOE_FAMILIES.values())
    bad = replace(
        MOE_FAMILIES["deepseek v3"], n_active=9, n_dense_layers=3, n_kv_heads=2, rope_head_dim=7
    )
    for name in ("n_active = 9", "n_dense_layers = 3", "n_kv_heads = 2", "rope_head_dim = 7"):
        assert name in messages(bad)
    assert "window = 0" in messages(replace(MOE_FAMILIES["gpt-oss"], window=0))
    assert "head_dim = 64" in messages(replace(MOE_FAMILIES["deepseek v3"], head_dim=64))
    backwards = replace(
        MOE_FAMILIES["gpt-oss"], rope_scaling=YarnRopeScaling(beta_fast=1.0, beta_slow=2.0)
    )
    (problem,) = backwards.problems(64)
    assert "beta_slow < beta_fast" in (problem.allowed or "")
    varlen = replace(MOE_FAMILIES["gpt-oss"], attention="varlen")
    assert "sinks" in varlen.device_problems("cuda")[0].message
    assert replace(MOE_FAMILIES["deepseek v3"], attention="varlen").device_problems("cuda")
