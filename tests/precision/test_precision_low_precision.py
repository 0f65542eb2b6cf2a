"""The pass that converts products: what it takes, what it leaves and why, what stays the same."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from armillary.foundation.errors import UserError
from armillary.models.decoder import Decoder
from armillary.models.layers.linear import Linear
from armillary.models.llama import Llama
from armillary.models.qwen3_moe import Qwen3MoE
from armillary.parallel.activation_checkpoint import checkpoint_activations
from armillary.parallel.collectives import group_name, maximum
from armillary.parallel.compile import compile_blocks
from armillary.parallel.config import Compile, Full, Selective
from armillary.parallel.materialise import materialise
from armillary.precision import Precision
from armillary.precision.compute import set_compute_dtype
from armillary.precision.config import (
    Float8Rowwise,
    Float8RowwiseExactWeightGradient,
    Float8Tensorwise,
    LowPrecision,
    LowPrecisionConfig,
    Mxfp8,
    NoLowPrecision,
)
from armillary.precision.low_precision import Report, convert_linears, matches, plan_conversion
from armillary.precision.products import LowPrecisionProduct
from armillary.recipe.overrides import TableLayer, apply, split_options
from armillary.recipe.recipe import Recipe
from armillary.recipe.toml import to_toml
from ranks import run_ranks

CPU = torch.device("cpu")
RECIPES: list[LowPrecision] = [
    Float8Tensorwise(),
    Float8Rowwise(),
    Float8RowwiseExactWeightGradient(),
    Mxfp8(),
]
DENSE = Llama(
    vocab_size=64, dim=32, n_layers=2, n_heads=2, n_kv_heads=2, ffn_dim=64, max_seq_len=64
)
MIXTURE = Qwen3MoE(
    vocab_size=64,
    dim=32,
    n_layers=2,
    n_heads=2,
    n_kv_heads=2,
    head_dim=16,
    ffn_dim=64,
    n_experts=4,
    n_active=2,
    expert_dim=32,
    max_seq_len=64,
)


def on_meta(family: Llama | Qwen3MoE) -> Decoder:
    with torch.device("meta"):
        return family.build()


def model_of(
    family: Llama | Qwen3MoE,
    config: LowPrecisionConfig,
    after: Callable[[nn.Module], None] = lambda model: None,
) -> tuple[Decoder, Report]:
    """A model in bfloat16 with first weights, converted."""
    model = on_meta(family)
    set_compute_dtype(model, torch.bfloat16)
    report = convert_linears(model, config, device=CPU)
    after(model)
    materialise(model, CPU, 0)
    return model, report


def gradients(model: Decoder) -> dict[str, Tensor]:
    """Logits, and gradients of something of them."""
    logits = model(torch.arange(48).view(2, 24))
    logits.float().square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **grads}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("config", RECIPES, ids=lambda config: config.recipe)
def test_linears_of_blocks_are_converted_and_nothing_else(config: LowPrecision) -> None:
    model, report = model_of(DENSE, config)
    plain, nothing = model_of(DENSE, NoLowPrecision())
    assert nothing.lines() == []
    linears = [name for name, module in model.named_modules() if isinstance(module, Linear)]
    assert list(report.converted) == linears
    assert len(linears) == 14
    assert report.left == {"head": "the loss is read from its products"}
    for name in linears:
        product = model.get_submodule(name).product
        assert isinstance(product, LowPrecisionProduct)
        assert product is model.get_submodule(linears[0]).product
    state, wanted = model.state_dict(), plain.state_dict()
    assert_equal(state, wanted)  # type: ignore[arg-type]
    found, exact = gradients(model), gradients(plain)
    assert not torch.equal(found["logits"], exact["logits"])
    for name, tensor in found.items():
        error = (tensor - exact[name]).norm() / exact[name].norm()
        assert 0 < error < 0.2, (name, float(error))


def checkpointed(model: nn.Module) -> None:
    checkpoint_activations(model, Full())


def checkpointed_and_compiled(model: nn.Module) -> None:
    checkpoint_activations(model, Selective())
    compile_blocks(model, Compile(enabled=True, backend="aot_eager"))


@pytest.mark.parametrize("config", RECIPES, ids=lambda config: config.recipe)
def test_checkpointing_and_compilation_change_no_bit(config: LowPrecision) -> None:
    wanted = gradients(model_of(DENSE, config)[0])
    assert_equal(gradients(model_of(DENSE, config, checkpointed)[0]), wanted)
    if config.recipe == "float8-tensorwise":  # with --full also the others
        assert_equal(gradients(model_of(DENSE, config, checkpointed_and_compiled)[0]), wanted)


@pytest.mark.full
@pytest.mark.parametrize("config", RECIPES[1:], ids=lambda config: config.recipe)
def test_compilation_of_the_other_recipes_changes_no_bit(config: LowPrecision) -> None:
    wanted = gradients(model_of(DENSE, config)[0])
    assert_equal(gradients(model_of(DENSE, config, checkpointed_and_compiled)[0]), wanted)


@pytest.mark.parametrize("config", RECIPES, ids=lambda config: config.recipe)
def test_experts_are_converted_and_their_router_is_not(config: LowPrecision) -> None:
    model, report = model_of(MIXTURE, config)
    experts = [name for name in report.converted if name.endswith("experts")]
    assert len(experts) == report.experts == 2
    assert {name.rpartition(".")[2]: why for name, why in report.left.items()} == {
        "head": "the loss is read from its products",
        "router": "it chooses experts, in float32",
    }
    found, exact = gradients(model), gradients(model_of(MIXTURE, NoLowPrecision())[0])
    for name in (name for name in found if ".experts." in name):
        assert found[name].isfinite().all()
        assert not torch.equal(found[name], exact[name])


_SKIPPED = "precision.linears.skip has layers.0"
_NOT_ASKED_FOR = "no pattern of precision.linears.only matches"


def test_everything_that_is_left_has_its_reason() -> None:
    family = Llama(
        vocab_size=64, dim=48, n_layers=3, n_heads=2, n_kv_heads=2, ffn_dim=40, max_seq_len=64
    )
    config = Float8Rowwise(skip=("layers.0", "*.value", "heads"), only=("layers.0", "layers.1"))
    report = plan_conversion(on_meta(family), config, device=CPU)
    converted = ("query", "key", "output")
    assert report.converted == tuple(f"layers.1.attention.{name}" for name in converted)
    odd = "not made of multiples of 16"
    assert report.left == {
        **dict.fromkeys(
            (n for n in report.left if ".0." in n), "precision.linears.skip has layers.0"
        ),
        **dict.fromkeys((n for n in report.left if ".2." in n), _NOT_ASKED_FOR),
        "layers.1.attention.value": "precision.linears.skip has *.value",
        "layers.1.feed_forward.gate": f"40 x 48 is {odd}",
        "layers.1.feed_forward.up": f"40 x 48 is {odd}",
        "layers.1.feed_forward.down": f"48 x 40 is {odd}",
        "head": "the loss is read from its products",
    }
    assert len(report.left) == 7 + 7 + 4 + 1
    lines = report.lines()
    assert lines[0] == (
        "float8-rowwise: 3 of 22 modules with matrix products, emulated (cpu has no float8 units)"
    )
    assert lines[1] == "  converted: layers.*.attention.query"
    assert lines[-1] == "  matches nothing here: heads"


def test_patterns_fit_whole_words() -> None:
    name = "layers.10.attention.query"
    for pattern in ("layers.*", "attention", "layers.10", "*.query", "1?.attention", name):
        assert matches(pattern, name), pattern
    for pattern in ("layers.1", "query.weight", "attent", "head"):
        assert not matches(pattern, name), pattern


def test_small_matrices_can_be_left() -> None:
    config = Float8Rowwise(small=False)
    report = plan_conversion(on_meta(DENSE), config, device=CPU)
    assert report.converted == ()
    assert report.left["layers.0.feed_forward.gate"] == "64 x 32 is small"
    assert not config.is_small(14336, 4096)
    assert config.is_small(1024, 4096)
    assert not Float8Tensorwise().is_small(1024, 14336)
    assert Float8Tensorwise().is_small(1024, 4096)


def test_experts_can_be_left() -> None:
    report = plan_conversion(on_meta(MIXTURE), Mxfp8(experts=False), device=CPU)
    left = [
        name for name, why in report.left.items() if why == "precision.linears.experts is false"
    ]
    assert len(left) == 2


def test_reports_of_parts_add_up() -> None:
    first = Report(recipe="mxfp8", converted=("a",), left={"b": "why"}, unused=("x", "y"))
    both = first + Report(recipe="mxfp8", converted=("c",), left={"d": "why"}, unused=("y",))
    assert both.converted == ("a", "c")
    assert both.left == {"b": "why", "d": "why"}
    assert both.unused == ("y",)


def typed(*words: str) -> Recipe:
    return apply(Recipe(), options=split_options(words)[1])


def test_the_command_line_and_toml_choose_recipes() -> None:
    name = "--precision.linears"
    skip, emulate = (f"{name}.skip", '["attention"]'), (f"{name}.emulate", "always")
    recipe = typed(name, "float8-rowwise", *skip, *emulate)
    assert recipe.precision.linears == Float8Rowwise(skip=("attention",), emulate="always")
    table = TableLayer(tomllib.loads(to_toml(recipe)), "")
    assert apply(Recipe(), [table]) == recipe
    for config in RECIPES:
        chosen = typed(name, config.recipe)
        assert chosen.precision.linears == config
        assert chosen.precision.problems() == []
    assert typed(name, "none") == Recipe()


def test_bad_values_are_refused_before_anything_starts() -> None:
    (empty,) = Precision(linears=Float8Rowwise(only=())).problems()
    assert "precision.linears.only" in empty.message
    (never,) = Precision(linears=Mxfp8(emulate="never")).problems()
    assert never.fix == "--precision.linears.emulate auto"
    report = plan_conversion(on_meta(DENSE), Float8Rowwise(emulate="never"), device=CPU)
    assert report.emulated == ""
    with pytest.raises(UserError, match="no float8 units"):
        plan_conversion(on_meta(DENSE), Float8Rowwise(emulate="never"), device=torch.device("xpu"))


def shared_products() -> dict[str, float]:
    """On two ranks: the largest error of a shared matrix's products, relative to the whole's."""
    rank, group = dist.get_rank(), group_name(dist.group.WORLD)
    agree = partial(maximum, group=group)
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(64, 64, generator=generator) for _ in range(3))
    # One rank's part has a maximum that blunts the rest of row 7, and meets only zeros itself.
    x[7, 3] = g[7, 3] = 1e5
    w[:, 3] = w[3] = 0
    half = slice(32 * rank, 32 * rank + 32)
    errors = {}
    for config in RECIPES:
        recipe = config.recipe
        whole = _run(LowPrecisionProduct(recipe, True), x, w, g)
        for agreed in (agree, None):
            one = LowPrecisionProduct(recipe, True, "outputs", agreed)
            y, grad_x, grad_w = _run(one, x, w[half], g[:, half])
            dist.all_reduce(grad_x)
            outputs = [(y, whole[0][:, half]), (grad_x, whole[1]), (grad_w, whole[2][half])]
            other: Callable[..., Tensor] = LowPrecisionProduct(recipe, True, "inputs", agreed)
            if agreed and recipe == "float8-rowwise":
                other = torch.compile(other, backend="aot_eager", fullgraph=True)
            y, grad_x, grad_w = _run(other, x[:, half], w[:, half], g)
            dist.all_reduce(y)
            inputs = [(y, whole[0]), (grad_x, whole[1][:, half]), (grad_w, whole[2][:, half])]
            error = max(float((a - b).norm() / b.norm()) for a, b in outputs + inputs)
            errors[f"{recipe} {'agreed' if agreed else 'alone'}"] = error
    return errors


def _run(
    product: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor, g: Tensor
) -> list[Tensor]:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = product(x, w)
    return [y.detach(), *torch.autograd.grad(y, (x, w), g)]


def test_matrices_that_ranks_share_have_the_scales_of_the_whole() -> None:
    for errors in run_ranks(shared_products, 2):
        for name, error in errors.items():
            recipe, how = name.split()
            if how == "agreed" or recipe == "mxfp8":  # its blocks are not cut
                assert error < 1e-6, (name, error)
            else:
                assert error > 1e-4, (name, error)
