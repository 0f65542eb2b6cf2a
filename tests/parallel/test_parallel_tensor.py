"""Decoders split over 2 and 4 tensor ranks against the same decoder in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tensor_cases import (
    FAMILIES,
    LENGTH,
    LLAMA,
    QWEN3,
    TIED,
    Setting,
    batch,
    loss_of,
    mesh_of,
    relative,
    split_model,
    whole_gradients,
    whole_model,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from armillary.models.layers.cache import KeyValueCache
from armillary.models.layers.documents import Documents
from armillary.parallel.config import Parallel
from armillary.parallel.layout import Layouts, local_shape
from armillary.parallel.mesh import Mesh
from armillary.parallel.tensor.tensor_parallel import split_tensors
from ranks import run_ranks

SETTINGS = {
    "llama": Setting(),
    "qwen3": Setting(config=QWEN3),
    "qwen3 tied": Setting(config=TIED),
    "llama biased": Setting(biased=True),
    "llama asynchronous": Setting(asynchronous=True),
    **{name: Setting(config=config) for name, config in FAMILIES.items()},
    "qwen3 tied biased asynchronous": Setting(config=TIED, biased=True, asynchronous=True),
}


def compare_all() -> dict[str, float]:
    """The largest relative deviation of each kind, over all settings."""
    torch.set_num_threads(1)
    worst: dict[str, float] = {}

    def note(kind: str, value: float) -> None:
        worst[kind] = max(worst.get(kind, 0.0), value)

    for setting in SETTINGS.values():
        ranks = dist.get_world_size()
        if any(degree % ranks for degree in setting.config.divisors()["tp"].values()):
            continue
        mesh = mesh_of(setting, ranks)
        whole = whole_model(setting)
        split, layouts = split_model(setting, mesh, whole)
        expected, loss = loss_of(whole), loss_of(split)
        note("loss", relative(loss.detach(), expected.detach()))
        expected.backward()
        loss.backward()
        gradients = whole_gradients(split, layouts, mesh)
        for name, parameter in whole.named_parameters():
            assert parameter.grad is not None
            note(f"gradient of {kind_of(name)}", relative(gradients[name], parameter.grad))
        compare_inference(whole, split, note)
    note("logits after a hand-over between stages", hand_over())
    for asynchronous in (False, True):
        over_ranks, alone = bfloat16_errors(mesh, asynchronous=asynchronous)
        note("bfloat16 error over that of one process", over_ranks / alone)
    return worst


def kind_of(name: str) -> str:
    """A parameter's name without its block."""
    return ".".join(part for part in name.split(".") if not part.isdigit())


@torch.no_grad()
def compare_inference(whole: nn.Module, split: nn.Module, note: object) -> None:
    """Logits of whole rows, of rows that ranks do not divide, and token by token."""
    assert callable(note)
    whole.eval()
    split.eval()
    note("loss in evaluation", relative(loss_of(split), loss_of(whole)))
    for length in (LENGTH, LENGTH - 1):
        tokens, _, documents = batch(length=length)
        note("logits", relative(split(tokens, documents), whole(tokens, documents)))
    tokens = tokens[:, :11]
    starts = Documents.from_lengths([(11,), (4, 7), (1, 10)])
    caches = [KeyValueCache(16), KeyValueCache(16)]
    for _ in range(4):  # a length that ranks divide among them, which a cache must not split
        ours, theirs = (
            model(tokens, starts, cache=cache)
            for model, cache in zip((split, whole), caches, strict=True)
        )
        note("logits from a cache", relative(ours, theirs))
        tokens, starts = theirs[:, -1:].argmax(-1), None


def hand_over() -> float:
    """A stage without an embedding goes on with the tokens that the stage before it had."""
    setting = Setting()
    mesh = mesh_of(setting, dist.get_world_size())
    whole = whole_model(setting)
    split, _ = split_model(setting, mesh, whole)
    later, _ = split_model(setting, mesh, whole)
    tokens, _, documents = batch()
    context = split.context(tokens, documents)
    hidden = split.embedding(tokens)
    first = split.layers["0"]
    visible = context.visible[None]
    hidden = first(hidden, context.rope, visible)
    assert hidden.shape == (tokens.shape[0], LENGTH // dist.get_world_size(), 48)
    del later.embedding, later.layers["0"]
    context = later.context(tokens, documents)
    handed_over = later.head(later.norm(later.run(hidden, context)))
    return relative(handed_over.detach(), whole(tokens, documents).detach())


def bfloat16_errors(mesh: Mesh, *, asynchronous: bool) -> tuple[float, float]:
    """How far gradients in bfloat16 are from fp32, relative: over ranks, and in one process."""
    exact = whole_model(Setting())
    setting = Setting(dtype=torch.bfloat16, asynchronous=asynchronous)
    whole = whole_model(setting)
    split, layouts = split_model(setting, mesh, whole)
    for model in (exact, whole, split):
        loss_of(model).backward()
    ours = whole_gradients(split, layouts, mesh)
    errors = torch.zeros(2)
    for (name, exactly), rounded in zip(exact.named_parameters(), whole.parameters(), strict=True):
        assert exactly.grad is not None and rounded.grad is not None
        for index, gradient in enumerate((ours[name], rounded.grad)):
            errors[index] += (gradient - exactly.grad).square().sum()
    over_ranks, alone = errors.sqrt().tolist()
    return over_ranks, alone


@pytest.mark.parametrize("world_size", [2, 4])
def test_loss_gradients_and_logits_are_those_of_one_process(world_size: int) -> None:
    results = run_ranks(compare_all, world_size)
    for worst in results:
        print(sorted(worst.items(), key=lambda item: item[1]))
        assert worst.pop("bfloat16 error over that of one process") < 1.25
        assert max(worst.values()) <= 1e-5, worst
        assert len(worst) > 12


def compare_compiled() -> dict[str, float]:
    """Blocks compiled as one graph each: how far from eager, and how many graphs there were."""
    torch.set_num_threads(1)
    setting = Setting(config=QWEN3, asynchronous=True, biased=True)
    mesh = mesh_of(setting, dist.get_world_size())
    whole = whole_model(setting)
    eager, layouts = split_model(setting, mesh, whole)
    compiled, _ = split_model(setting, mesh, whole)
    counter = CompileCounterWithBackend("aot_eager")
    for block in compiled.layers.values():
        block.forward = torch.compile(block.forward, backend=counter, fullgraph=True)
    losses = [loss_of(model) for model in (eager, compiled)]
    for loss in losses:
        loss.backward()
    expected, ours = (whole_gradients(model, layouts, mesh) for model in (eager, compiled))
    deviations = {name: relative(ours[name], expected[name]) for name in expected}
    deviations["loss"] = relative(losses[1].detach(), losses[0].detach())
    assert counter.frame_count == 1
    with torch.no_grad():  # rows that are not split, by the synchronous collectives
        tokens = batch()[0][:, :-1]
        deviations["logits"] = relative(compiled.eval()(tokens), eager.eval()(tokens))
    assert counter.frame_count == 2
    return deviations


@pytest.mark.full
def test_a_compiled_block_is_one_graph_that_blocks_share_with_the_same_numbers() -> None:
    for deviations in run_ranks(compare_compiled, 2):
        assert max(deviations.values()) <= 1e-5, deviations


def test_every_rank_of_an_imagined_mesh_can_be_cut_without_its_peers() -> None:
    parallel = Parallel(tp=4, dp_shard=1)
    elements = 0
    for rank in range(4):
        mesh = Mesh.imagined(parallel, 4, rank)
        with torch.device("meta"):
            model = TIED.build()
        layouts = Layouts.of(model)
        split_tensors(model, mesh, layouts)
        for name, parameter in model.named_parameters():
            layout = layouts.layout(name)
            assert tuple(parameter.shape) == local_shape(layout, mesh)
            if layout.partial:
                assert layout.partial == ("tp",) and "norm" in name
            else:
                elements += parameter.numel()
        assert model.head.weight is model.embedding.weight
        assert mesh.coordinate("tp") == rank
    with torch.device("meta"):
        total = sum(p.numel() for n, p in TIED.build().named_parameters() if "norm" not in n)
    assert elements == total


def test_a_mesh_without_tensor_ranks_leaves_the_model_alone() -> None:
    with torch.device("meta"):
        model = LLAMA.build()
    layouts = Layouts.of(model)
    before = dict(layouts), [*model.parameters()]
    split_tensors(model, Mesh.imagined(Parallel(dp_shard=1), 1, 0), layouts)
    assert dict(layouts) == before[0]
    assert all(a is b for a, b in zip(model.parameters(), before[1], strict=True))
    assert "forward" not in vars(model.layers["0"].attention)
