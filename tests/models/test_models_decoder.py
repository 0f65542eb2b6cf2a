"""The decoder around the blocks: dtypes, ties, initialisation, output functions, compilation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from armillary.models import Llama
from armillary.models.layers.documents import Documents
from armillary.models.layers.embedding import Head
from armillary.models.layers.initializer import Initializer
from armillary.models.layers.rope import Rope
from model_cases import FAMILIES, build, random_tokens


def test_parameters_have_the_names_that_checkpoints_rely_on() -> None:
    block = (
        "attention_norm.weight", "attention.query.weight", "attention.key.weight",
        "attention.value.weight", "attention.output.weight", "attention.query_norm.weight",
        "attention.key_norm.weight", "feed_forward_norm.weight", "feed_forward.gate.weight",
        "feed_forward.up.weight", "feed_forward.down.weight",
    )  # fmt: skip
    ends = {"embedding.weight", "norm.weight"}
    qwen3 = {name for name, _ in build(FAMILIES["qwen3"]).named_parameters()}
    assert qwen3 == ends | {f"layers.{i}.{name}" for i in (0, 1) for name in block}
    llama = build(FAMILIES["llama"])
    plain = {f"layers.{i}.{name}" for i in (0, 1) for name in block if "y_norm" not in name}
    assert {name for name, _ in llama.named_parameters()} == ends | {"head.weight"} | plain
    assert llama.state_dict().keys() == dict(llama.named_parameters()).keys()


def test_a_tied_head_is_the_embedding_and_gathers_both_gradients() -> None:
    model = build(FAMILIES["llama tied"])
    assert model.head.weight is model.embedding.weight
    model(random_tokens(1, 8)).sum().backward()
    assert model.embedding.weight.grad is not None
    assert (model.embedding.weight.grad.abs().sum(dim=1) > 0).all()  # the head reaches every row


def test_initialisation_is_declared_for_every_parameter() -> None:
    initializers = Llama(dim=256, n_layers=8).build().initializers()
    narrow = 0.02 / math.sqrt(16)
    expected = {
        "embedding.weight": 0.02, "head.weight": 1 / 16, "layers.3.attention.query.weight": 0.02,
        "layers.3.attention.output.weight": narrow, "layers.3.feed_forward.down.weight": narrow,
        "layers.3.feed_forward.up.weight": 0.02,
    }  # fmt: skip
    for name, std in expected.items():
        assert initializers[name] == Initializer(kind="truncated_normal", std=std, cut=3.0)
    assert initializers["layers.3.attention_norm.weight"] == Initializer(kind="ones")
    by_layer = Llama(n_layers=8, init_depth="layer").build().initializers()
    assert by_layer["layers.0.feed_forward.down.weight"].std == 0.02 / math.sqrt(2)


def test_a_parameter_without_declared_initialisation_is_an_error() -> None:
    model = build(FAMILIES["llama"])
    model.layers["0"].attention.query = torch.nn.Linear(32, 32)
    with pytest.raises(TypeError, match=r"layers.0.attention.query \(Linear\) needs initial"):
        model.initializers()


def test_output_functions_run_inside_the_head_on_hidden_states_and_the_head() -> None:
    model, tokens, inside = build(FAMILIES["qwen3"]), random_tokens(2, 8), []
    model.head.register_forward_pre_hook(lambda *_: inside.append("in"))
    model.head.register_forward_hook(lambda *_: inside.append("out"))

    def output(hidden: torch.Tensor, head: Head) -> torch.Tensor:
        inside.append("run")
        return hidden @ head.weight.mT

    torch.testing.assert_close(model(tokens, output=output), model(tokens))
    assert inside == ["in", "run", "out", "in", "out"]


def test_computation_follows_the_embedding_and_master_weights_stay_fp32() -> None:
    model, tokens = build(FAMILIES["qwen3"]), random_tokens(2, 32)
    exact = model(tokens)
    model.embedding.output_dtype = torch.bfloat16
    seen = []
    for layer in model.layers.values():
        layer.register_forward_hook(lambda module, inputs, out: seen.append(out.dtype))
    rounded = model(tokens)
    rounded.float().square().mean().backward()
    assert [*seen, rounded.dtype] == [torch.bfloat16] * 3
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert (rounded - exact).norm() / exact.norm() < 2**-5


def test_rotary_angles_are_the_papers_and_attention_sees_only_distances() -> None:
    positions = torch.tensor([0, 1, 1000])
    tables = Rope(head_dim=8, theta=10_000.0).tables(positions)
    angles = [[m * 10_000 ** (-2 * i / 8) for i in range(4)] for m in (0, 1, 1000)]
    torch.testing.assert_close(tables.cos, torch.tensor(angles).cos(), rtol=0, atol=1e-4)
    torch.testing.assert_close(tables.sin, torch.tensor(angles).sin(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("attention", ["blocked", "sdpa"])
def test_forward_and_backward_never_ask_the_device_for_a_value(attention: str) -> None:
    with torch.device("meta"):  # tensors without values: asking for one is an error
        model = replace(FAMILIES["qwen3"], attention=attention).build()
    documents = Documents.from_lengths([[5, 59], [64]]).to("meta")
    logits = model(random_tokens(2, 64).to("meta"), documents)
    logits.sum().backward()
    assert logits.shape == (2, 64, 61)
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(("family", "attention"), [("llama", "blocked"), ("qwen3", "sdpa")])
def test_compiled_blocks_serve_every_batch_without_compiling_again(
    family: str, attention: str
) -> None:
    model, eager = (build(FAMILIES[family], attention=attention) for _ in range(2))
    torch._dynamo.reset()
    for layer in model.layers.values():
        layer.compile(backend="aot_eager", fullgraph=True)
    cuts = [[[5, 59], [64]], [[1] * 64, [30, 34]], [[63, 1], [8] * 8]]
    first = Documents.from_lengths(cuts[0])
    model(random_tokens(2, 64), first).sum().backward()
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed, cut in enumerate(cuts):
            tokens, documents = random_tokens(2, 64, seed=seed), Documents.from_lengths(cut)
            logits = model(tokens, documents)
            torch.testing.assert_close(logits, eager(tokens, documents), rtol=1e-5, atol=1e-5)
            logits.sum().backward()
    torch._dynamo.reset()


@torch.no_grad()
def test_compiled_flex_blocks_serve_every_batch_without_compiling_again() -> None:
    model = build(FAMILIES["llama"], attention="flex")
    torch._dynamo.reset()
    for layer in model.layers.values():
        layer.compile(backend="eager", fullgraph=True)
    model(random_tokens(1, 128), Documents.from_lengths([[100, 28]]))
    with torch.compiler.set_stance("fail_on_recompile"):
        model(random_tokens(1, 128), Documents.from_lengths([[3, 5, 120]]))
    torch._dynamo.reset()
