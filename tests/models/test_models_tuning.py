"""What is trained of a model, what is put beside its weights, and the plain model it comes to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from armillary.foundation.errors import UserError
from armillary.kernels import swiglu
from armillary.models import Llama
from armillary.models.config import ModelConfig
from armillary.models.decoder import Decoder
from armillary.models.layers.experts import Experts
from armillary.models.layers.linear import GatedLinear, Linear
from armillary.models.layers.low_rank import factor_names, is_factor
from armillary.models.tuning.config import Full, LoRA, TuningConfig
from armillary.models.tuning.counting import flops_breakdown, trained_parameters
from armillary.models.tuning.merge import Box, merge_low_rank, merged, merged_sources
from armillary.parallel.materialise import materialise
from armillary.recipe.build import build_model
from armillary.recipe.problems import problems
from armillary.recipe.recipe import Recipe
from model_cases import FAMILIES, build, random_tokens, relative_difference
from moe_cases import MOE_FAMILIES, build_moe

ALL: dict[str, ModelConfig] = {
    **FAMILIES,
    **MOE_FAMILIES,
    "deepseek ahead": replace(MOE_FAMILIES["deepseek v3"], predict_ahead=True),  # type: ignore[call-arg]
}
LORA = LoRA(rank=4, alpha=8)


def plain(name: str) -> Decoder:
    """A family's model with values that show in the logits."""
    dense = name in FAMILIES
    return (build(FAMILIES[name]) if dense else build_moe(MOE_FAMILIES[name])).eval()


def first_weights(name: str) -> Decoder:
    """A family's model as it starts."""
    with torch.device("meta"):
        model = ALL[name].build()
    materialise(model, torch.device("cpu"), seed=0)
    return model.eval()


def with_factors(model: Decoder, tuning: LoRA = LORA) -> Decoder:
    """The model with factors that are not zero."""
    tuning.apply(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_factor(name):
                parameter.normal_(0.0, 0.05, generator=generator)
    return model


def on_meta(config: ModelConfig, tuning: TuningConfig) -> Decoder:
    """A tuned model without memory."""
    with torch.device("meta"):
        return build_model(replace(Recipe(), model=config, tuning=tuning))


def trained_names(model: nn.Module) -> set[str]:
    """Names of what is trained."""
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("name", [*FAMILIES, *MOE_FAMILIES])
def test_factors_start_by_changing_nothing(name: str) -> None:
    model, tokens = plain(name), random_tokens(2, 12)
    before = model(tokens)
    LORA.apply(model)
    for key, parameter in model.named_parameters():
        if is_factor(key):
            nn.init.constant_(parameter, 0.3 if key.endswith("a") else 0.0)
    assert torch.equal(model(tokens), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*FAMILIES, *MOE_FAMILIES])
def test_a_merged_model_computes_what_the_unmerged_one_does(name: str, dtype: torch.dtype) -> None:
    model, tokens = with_factors(first_weights(name)).to(dtype), random_tokens(2, 12)
    unmerged = model(tokens)
    assert relative_difference(unmerged, first_weights(name)(tokens)) > 1e-3
    merge_low_rank(model.modules())
    limit = 1e-6 if dtype == torch.float32 else 1e-12
    assert relative_difference(model(tokens), unmerged) <= limit
    assert model.state_dict().keys() == first_weights(name).state_dict().keys()


@pytest.mark.parametrize("name", ["llama tied", "deepseek v3", "gpt-oss"])
def test_factors_are_trained_and_every_other_parameter_gets_no_gradient(name: str) -> None:
    model = with_factors(plain(name)).train()
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    model(random_tokens(2, 12)).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for key, parameter in model.named_parameters():
        assert (parameter.grad is not None) == is_factor(key), key
        assert torch.equal(parameter, before[key]) == (not is_factor(key)), key


@pytest.mark.parametrize("gated", [False, True])
def test_a_linear_adds_the_scaled_product_of_its_factors(gated: bool) -> None:
    torch.manual_seed(0)
    kind = GatedLinear if gated else Linear
    linear = kind(6, 5, std=0.1, bias=True).double()
    linear.add_low_rank("weight", rank=3, scale=0.7)
    for parameter in linear.parameters():
        nn.init.normal_(parameter)
    inputs = tuple(torch.randn(2, 6, dtype=torch.float64) for _ in range(1 + gated))
    x = swiglu(*inputs) if gated else inputs[0]
    assert linear.bias is not None
    a, b = (linear.get_parameter(each) for each in factor_names("weight"))
    whole = linear.weight + 0.7 * b @ a
    torch.testing.assert_close(linear(*inputs), x @ whole.mT + linear.bias)


def test_each_expert_has_factors_of_its_own() -> None:
    torch.manual_seed(0)
    experts = Experts(4, 6, n_experts=3, std=0.1, output_std=0.1, bias=True).double()
    for attribute in experts.low_rank_targets:
        experts.add_low_rank(attribute, rank=2, scale=0.5)
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    counts = torch.tensor([2, 0, 3])
    x = torch.randn(5, 4, dtype=torch.float64)
    whole = {}
    for attribute in experts.low_rank_targets:
        a, b = (getattr(experts, each) for each in factor_names(attribute))
        whole[attribute] = getattr(experts, attribute) + 0.5 * b @ a
    expected = []
    for expert, rows in enumerate(torch.split(x, counts.tolist())):
        gate, up = (
            rows @ whole[each][expert].mT + experts.get_parameter(f"{each}_bias")[expert]
            for each in ("gate", "up")
        )
        hidden = torch.nn.functional.silu(gate) * up
        bias = experts.get_parameter("down_bias")[expert]
        expected.append(hidden @ whole["down"][expert].mT + bias)
    torch.testing.assert_close(experts(x, counts), torch.cat(expected))


def test_first_values_of_factors_depend_on_seed_and_name_and_b_is_zero() -> None:
    model = on_meta(FAMILIES["llama"], LORA)
    materialise(model, torch.device("cpu"), seed=5)
    a = {name: p for name, p in model.named_parameters() if name.endswith("lora_a")}
    assert all(not p.any() for n, p in model.named_parameters() if n.endswith("lora_b"))
    query, key = (a[f"layers.0.attention.{each}.lora_a"] for each in ("query", "key"))
    assert query.shape == (4, 32)
    assert not torch.equal(query, key)
    values = torch.cat([p.flatten() * math.sqrt(3 * p.shape[1]) for p in a.values()])
    assert float(values.detach().std()) == pytest.approx(0.987, rel=0.03)  # of a normal cut at 3


def test_scales_are_those_of_both_papers() -> None:
    assert LoRA(rank=16, alpha=32).low_rank_scale == 2
    assert LoRA(rank=16, alpha=32, scaling="rank-stabilised").low_rank_scale == 8
    assert Full().low_rank_scale is None


def test_patterns_choose_targets_and_what_else_is_trained() -> None:
    tuning = LoRA(targets=("*.query", "*.experts.up"), trained=("*.router.weight",))
    names = trained_names(on_meta(MOE_FAMILIES["qwen3-moe"], tuning))
    assert {name for name in names if ".0." in name} == {
        "layers.0.attention.query.lora_a",
        "layers.0.attention.query.lora_b",
        "layers.0.feed_forward.experts.up_lora_a",
        "layers.0.feed_forward.experts.up_lora_b",
        "layers.0.feed_forward.router.weight",
    }
    frozen = Full(frozen=("head.weight", "layers.1.*"))
    names = trained_names(on_meta(FAMILIES["llama tied"], frozen))
    assert names and all(name.startswith(("layers.0.", "norm.")) for name in names)  # tied
    for either in ("embedding.weight", "head.weight"):
        names = trained_names(on_meta(FAMILIES["llama tied"], LoRA(trained=(either,))))
        assert "embedding.weight" in names, "a tied parameter is trained by either name"


def test_wrong_tunings_are_refused_in_words() -> None:
    refused = {
        r"tuning.targets: the pattern '\*.quary' matches no matrix.*\n.*attention.query":
            LoRA(targets=("*.quary",)),
        r"tuning.trained: the pattern 'norms.weight' matches no parameter":
            LoRA(trained=("norms.weight",)),
        r"tuning.frozen: the pattern 'embed.\*' matches no parameter":
            Full(frozen=("embed.*",)),
        r"leaves no parameter to be trained": Full(frozen=("*",)),
    }  # fmt: skip
    for message, tuning in refused.items():
        with pytest.raises(UserError, match=message):
            on_meta(FAMILIES["llama"], tuning)
    bad = LoRA(rank=0, alpha=math.nan, targets=(), scaling="other")  # type: ignore[arg-type]
    told = "\n".join(p.render() for p in problems(replace(Recipe(), tuning=bad), data=False))
    for part in ("tuning.rank = 0", "tuning.alpha = nan", "tuning.targets = []", "'other'"):
        assert part.replace("'", "") in told


class Held:
    """A tensor that counts what is read of it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.read_elements = tensor, 0
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype

    def read(self, box: Box) -> Tensor:
        part = self.tensor[tuple(slice(*each) for each in box)]
        self.read_elements += part.numel()
        return part


def boxes(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    """Boxes in a tensor, empty ones among them."""
    sides = [
        st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda side: tuple(sorted(side)))
        for size in shape
    ]
    return st.tuples(*sides)  # type: ignore[return-value]


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from([(6, 5), (3, 6, 5)]), st.sampled_from([torch.bfloat16, None]))
def test_a_box_of_a_merged_weight_is_that_of_the_whole_and_reads_no_more(
    data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype | None
) -> None:
    generator = torch.Generator().manual_seed(2)
    *stack, outputs, inputs = shape
    weight = torch.randn(shape, generator=generator).to(dtype or torch.float32)
    a = torch.randn(*stack, 2, inputs, generator=generator)
    b = torch.randn(*stack, outputs, 2, generator=generator)
    attribute = "x.gate" if stack else "x.weight"
    names = (attribute, *factor_names(attribute), "norm.weight")
    held = dict(zip(names, map(Held, (weight, a, b, torch.ones(3))), strict=True))
    sources = merged_sources(held, 0.5)
    assert list(sources) == [attribute, "norm.weight"]
    box = data.draw(boxes(shape))
    part = sources[attribute].read(box)
    expected = merged(weight, a, b, 0.5)[tuple(slice(*each) for each in box)]
    assert part.dtype == weight.dtype
    rtol, atol = (2**-7, 1e-2) if dtype else (1e-5, 1e-6)  # sums of boxes may round otherwise
    torch.testing.assert_close(part, expected, rtol=rtol, atol=atol)
    lengths = [end - start for start, end in box]
    matrices = math.prod(lengths[:-2])
    read = matrices * (lengths[-2] * lengths[-1] + 2 * (lengths[-2] + lengths[-1]))
    assert sum(each.read_elements for each in held.values()) == read
    assert merged_sources(held, None).keys() == held.keys()


def test_weights_are_merged_in_float32_and_rounded_once() -> None:
    weight = torch.ones(1, 1, dtype=torch.bfloat16)
    a, b = torch.full((1, 1), 2.0**-9), torch.ones(1, 1)
    assert float(merged(weight, a, b, 1.0)) == 1.0  # half a unit in the last place, to even
    assert float(merged(weight, a, b, 3.0)) == 1.0 + 2.0**-7  # and not lost three times


def _tunings() -> Iterator[TuningConfig]:
    yield Full(frozen=("embedding.weight",))
    yield Full(frozen=("embedding.weight", "layers.0.*"))
    yield Full(frozen=("*.query.weight", "*.down.weight"))
    yield Full(frozen=("embedding.weight", "layers.*", "norm.weight"))
    yield LoRA(rank=4, trained=("*_norm.weight",))
    yield LoRA(rank=4, targets=("layers.1.*",), trained=("layers.1.attention_norm.weight",))


@pytest.mark.parametrize("tuning", _tunings(), ids=str)
def test_flops_equal_what_torch_counts_so_frozen_weights_cost_no_gradient(
    tuning: TuningConfig,
) -> None:
    config = Llama(
        vocab_size=96, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=48,
        attention="sdpa",
    )  # fmt: skip
    model, tokens = config.build(), torch.zeros(2, 24, dtype=torch.int64)
    tuning.apply(model)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    frozen = shapes.keys() - trained_names(model)
    math_kernel = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with math_kernel, FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    found = flops_breakdown(config, shapes, frozen, seq_len=24, causal=False)
    assert counter.get_total_flops() == pytest.approx(sum(found.values()) * tokens.numel())


@pytest.mark.parametrize("name", ALL)
def test_every_matrix_of_a_family_is_counted_once(name: str) -> None:
    config = ALL[name]
    model = on_meta(config, Full())
    shapes = {key: tuple(p.shape) for key, p in model.named_parameters()}
    assert trained_parameters(shapes, ()) == config.parameter_count()
    plain_flops = config.flops_breakdown(16, causal=True)
    assert flops_breakdown(config, shapes, (), seq_len=16, causal=True) == plain_flops
    # With nothing but the head trained, all but the head's own gradient is a third of it.
    frozen = shapes.keys() - {"head.weight"}
    third = flops_breakdown(config, shapes, frozen, seq_len=16, causal=True)
    for kind, count in plain_flops.items():
        trained = kind == "head" and "head.weight" in shapes
        assert third[kind] == pytest.approx(count * (2 / 3 if trained else 1 / 3)), kind


@pytest.mark.parametrize("name", MOE_FAMILIES)
def test_factors_of_experts_cost_as_often_as_the_expert_is_used(name: str) -> None:
    config = MOE_FAMILIES[name]
    model = on_meta(config, LoRA(rank=4, targets=("*.experts.*",), trained=("embedding.weight",)))
    shapes = {key: tuple(p.shape) for key, p in model.named_parameters()}
    frozen = shapes.keys() - trained_names(model)
    found = flops_breakdown(config, shapes, frozen, seq_len=16, causal=True)
    before = config.flops_breakdown(16, causal=True)
    factors = sum(math.prod(shape) for key, shape in shapes.items() if is_factor(key))
    added = 6 * factors * config.n_active / config.n_experts
    assert found["experts"] == pytest.approx(before["experts"] * 2 / 3 + added)
    assert found["attention.projections"] == pytest.approx(before["attention.projections"] * 2 / 3)
    assert found["attention.scores"] == before["attention.scores"]


@pytest.mark.full
def test_a_compiled_block_with_factors_is_one_graph_and_computes_the_same() -> None:
    model, tokens = with_factors(plain("llama")).double().train(), random_tokens(2, 12)
    expected = model(tokens)
    expected.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.layers.values():
        block.forward = torch.compile(block.forward, backend=counter, fullgraph=True)  # type: ignore[method-assign]
    torch.testing.assert_close(model(tokens), expected)
    model(tokens).square().sum().backward()
    assert counter.frame_count <= 2, "all blocks but the first, whose input needs no gradient"
    for name, parameter in model.named_parameters():
        if is_factor(name):
            torch.testing.assert_close(parameter.grad, gradients[name])
        else:
            assert parameter.grad is None
