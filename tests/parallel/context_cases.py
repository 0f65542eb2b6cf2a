"""Attention shared by ranks, against fp64 in one process: what each rank deviates by."""

from __future__ import annotations

import dataclasses
import itertools
import resource
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from armillary.data.batch import IGNORED, Batch
from armillary.kernels import attention_with_sinks, reference
from armillary.models import Llama
from armillary.models.decoder import Decoder
from armillary.models.layers.attention_core import AttentionCore
from armillary.models.layers.cache import KeyValueCache
from armillary.models.layers.documents import Documents
from armillary.parallel import Compile, Full, Parallel, process
from armillary.parallel.activation_checkpoint import checkpoint_activations
from armillary.parallel.compile import compile_blocks
from armillary.parallel.context.balance import head_tail, indices_by_rank
from armillary.parallel.context.batches import shard_batch
from armillary.parallel.context.context_parallel import split_context
from armillary.parallel.context.gathered import block_mask
from armillary.parallel.mesh import Mesh
from armillary.tasks.next_token import NextToken
from model_cases import build, random_tokens

WAYS = [
    ("all-gather", "head-tail"),
    ("all-gather", "none"),
    ("ring", "head-tail"),
    ("ring", "none"),
    ("ulysses", "none"),
]
ONE_OF_EACH = [WAYS[0], WAYS[2], WAYS[4]]
LENGTH = 64
PACKED = [[1] * 5 + [11, 3, 24, 21], [31, 1, 8, 24]]
"""Documents that end inside, at and around the edges of chunks, and of one token."""


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Shapes and options of one attention."""

    query: int = 8
    kv: int = 4
    width: int = 8
    value_width: int = 8
    packed: bool = True
    window: int | None = None
    sinks: bool = False
    scale: float | None = None


HEADS = {
    "whole rows": Heads(packed=False),
    "packed": Heads(),
    "window": Heads(window=7),
    "window over whole rows": Heads(packed=False, window=20),
    "sinks": Heads(sinks=True, kv=2),
    "sinks and window": Heads(sinks=True, window=9, scale=0.7),
    "narrow values": Heads(value_width=5, kv=8, scale=0.2),
    "one kv head": Heads(kv=1),
    "three kv heads of twelve": Heads(query=12, kv=3),
}


def mesh_of(way: tuple[str, str], ranks: int) -> Mesh:
    """All ranks in one group of cp."""
    parallel = Parallel(dp_shard=1, cp=ranks, context=way[0], context_balance=way[1])
    return Mesh.create(parallel, process.choose_device("cpu"))


def own_indices(mesh: Mesh, length: int = LENGTH) -> Tensor:
    """Where this rank's tokens stand in the row."""
    by_rank = indices_by_rank(length, mesh.degree("cp"), head_tail=head_tail(mesh.parallel))
    return by_rank[mesh.coordinate("cp")]


def relative(ours: Tensor, truth: Tensor) -> float:
    """Largest difference as a share of the largest true value."""
    ours, truth = ours.detach(), truth.detach()
    return float((ours.double() - truth).abs().max() / truth.abs().max())


def packed_rows(length: int, packed: bool) -> Documents:
    """Two rows."""
    return Documents.from_lengths(PACKED if packed else [[length]] * 2)


def attention_deviations(ranks: int) -> dict[str, float]:
    """For each way and each attention, the worst of out and gradients on this rank."""
    worst = {}
    for way, (name, heads) in itertools.product(WAYS, HEADS.items()):
        if way[0] == "ulysses" and heads.query % ranks:
            continue
        worst[f"{' '.join(way)}: {name}"] = max(_attention(mesh_of(way, ranks), heads).values())
    return worst


def _attention(mesh: Mesh, heads: Heads) -> dict[str, float]:
    inputs, grad = _random_attention(heads)
    documents = packed_rows(LENGTH, heads.packed)
    core, model = _core(heads, mesh)
    indices = own_indices(mesh)
    local = [x[:, :, indices].float().requires_grad_() for x in inputs[:3]]
    tokens = torch.zeros(2, len(indices), dtype=torch.int64)
    visible = model.prepare(documents.select(indices), tokens, heads.window)
    out = core(*local, visible)
    out.backward(grad[:, :, indices].float())
    truth, grads = _true_attention(heads, inputs, grad, documents)
    found = {"out": relative(out, truth[:, :, indices])}
    for name, x, whole in zip("qkv", local, grads, strict=False):
        assert x.grad is not None
        found[name] = relative(x.grad, whole[:, :, indices])
    if core.sinks is not None:
        assert core.sinks.grad is not None
        dist.all_reduce(core.sinks.grad)
        found["sinks"] = relative(core.sinks.grad, grads[3])
    return found


def _random_attention(heads: Heads) -> tuple[list[Tensor], Tensor]:
    """Query, key, value and sinks of whole rows, and a gradient of out, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (2, heads.query, LENGTH, heads.width),
        (2, heads.kv, LENGTH, heads.width),
        (2, heads.kv, LENGTH, heads.value_width),
        (heads.query,),
        (2, heads.query, LENGTH, heads.value_width),
    ]
    *inputs, grad = (torch.randn(shape, generator=generator).double() for shape in shapes)
    return inputs, grad


def _true_attention(
    heads: Heads, inputs: list[Tensor], grad: Tensor, documents: Documents
) -> tuple[Tensor, tuple[Tensor, ...]]:
    seen = documents if heads.window is None else documents.within(heads.window)
    leaves = [x.clone().requires_grad_() for x in inputs[: 4 if heads.sinks else 3]]
    index = torch.arange(LENGTH)
    out, lse = reference.partial_attention(
        *leaves[:3], index, index, starts=seen.starts, scale=heads.scale
    )
    if heads.sinks:
        out = attention_with_sinks(out, lse, leaves[3])
    return out, torch.autograd.grad(out, leaves, grad)


def _core(heads: Heads, mesh: Mesh) -> tuple[AttentionCore, Decoder]:
    """An attention core in a decoder that the pass has gone over."""
    model = build(tiny())
    core = AttentionCore(
        heads.width,
        window=heads.window,
        scale=heads.scale,
        sink_heads=heads.query if heads.sinks else 0,
    )
    if core.sinks is not None:
        core.sinks.data.copy_(_random_attention(heads)[0][3])
    model.layers["0"].attention.core = core
    split_context(model, mesh)
    return core, model


def leaks(ranks: int) -> dict[str, bool]:
    """For each way, whether what one document holds changes a bit of the others' results."""
    found = {}
    heads = Heads(kv=2)
    inputs, grad = _random_attention(heads)
    documents = packed_rows(LENGTH, packed=True)
    changed = torch.zeros(2, LENGTH, dtype=torch.bool)
    changed[0, 8:19] = changed[1, 32:40] = True  # documents that lie across chunks, or inside one
    others = [x.clone() for x in inputs[:3]]
    for x in others:
        x.transpose(1, 2)[changed] *= -1e3
    grad.transpose(1, 2)[changed] = 0
    for way in WAYS:
        mesh = mesh_of(way, ranks)
        core, model = _core(heads, mesh)
        indices = own_indices(mesh)
        tokens = torch.zeros(2, len(indices), dtype=torch.int64)
        visible = model.prepare(documents.select(indices), tokens, None)
        outcomes = []
        for version in (inputs[:3], others):
            local = [x[:, :, indices].float().requires_grad_() for x in version]
            out = core(*local, visible)
            out.backward(grad[:, :, indices].float())
            kept = ~changed[:, indices]
            results = [out.detach(), *(x.grad for x in local if x.grad is not None)]
            outcomes.append([x.transpose(1, 2)[kept] for x in results])
        same = all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
        found[" ".join(way)] = not same
    return found


def tiny() -> Llama:
    """Two blocks; four kv heads would be too easy for four ranks."""
    return Llama(
        vocab_size=61, dim=32, n_layers=2, n_heads=8, n_kv_heads=2, ffn_dim=48, max_seq_len=512
    )


def packed_batch() -> Batch:
    """Two rows with labels, some of them not counted."""
    labels = random_tokens(2, LENGTH, seed=2)
    labels[0, ::7] = IGNORED
    return Batch(
        tokens=random_tokens(2, LENGTH, seed=1),
        labels=labels,
        documents=packed_rows(LENGTH, packed=True),
        sample_ids=(0, 1),
    )


def loss_and_gradients(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The sum of the loss, and the gradient of every parameter, by name."""
    loss = NextToken(chunk_tokens=16).loss(model, batch).sum
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def decoder_deviations(ranks: int, compiled: bool) -> dict[str, float]:
    """For each way, the worst deviation of loss and gradients, summed over ranks."""
    truth = loss_and_gradients(build(tiny()).double(), packed_batch())
    worst = {}
    for way, repeated in [*((way, False) for way in WAYS), *((way, True) for way in ONE_OF_EACH)]:
        model, mesh = build(tiny()), mesh_of(way, ranks)
        split_context(model, mesh)
        if repeated:
            checkpoint_activations(model, Full())
            compile_blocks(model, Compile(enabled=compiled, backend="aot_eager"))
        found = loss_and_gradients(model, shard_batch(packed_batch(), mesh))
        assert found.keys() == truth.keys()
        for x in found.values():
            dist.all_reduce(x)
        name = " ".join(way) + (", recomputed" if repeated else "")
        worst[name] = max(relative(found[key], truth[key]) for key in truth)
    return worst


def whole_rows_after_the_pass(ranks: int) -> dict[str, bool]:
    """For each way, whether whole rows, and rows read through a cache, give the same bits."""
    batch, plain = packed_batch(), build(tiny())
    same = {}
    for way in WAYS:
        model = build(tiny())
        split_context(model, mesh_of(way, ranks))
        with torch.no_grad():
            outcomes = [
                (
                    m(batch.tokens, batch.documents),
                    m(batch.tokens),
                    m(batch.tokens[:, :9], cache=KeyValueCache(16)),
                )
                for m in (plain, model)
            ]
        same[" ".join(way)] = all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    return same


def low_precision_deviations(ranks: int) -> dict[str, float]:
    """For each way in bfloat16, the worst of out and gradients, relative to its eager oracle's."""
    heads = HEADS["packed"]
    inputs, grad = _random_attention(heads)
    inputs, grad = [x.bfloat16().double() for x in inputs], grad.bfloat16().double()
    documents = packed_rows(LENGTH, heads.packed)
    truth = _true_attention(heads, inputs, grad, documents)
    low = _true_attention(heads, [x.bfloat16() for x in inputs], grad.bfloat16(), documents)
    worst = {}
    for way in WAYS:
        mesh = mesh_of(way, ranks)
        core, model = _core(heads, mesh)
        indices = own_indices(mesh)
        local = [x[:, :, indices].bfloat16().requires_grad_() for x in inputs[:3]]
        tokens = torch.zeros(2, len(indices), dtype=torch.int64)
        out = core(*local, model.prepare(documents.select(indices), tokens, None))
        grads = torch.autograd.grad(out, local, grad[:, :, indices].bfloat16())
        assert all(x.dtype == torch.bfloat16 for x in (out, *grads))
        ratios = [
            float((ours - true[:, :, indices]).norm() / (eager - true)[:, :, indices].norm())
            for ours, eager, true in zip(
                (out.detach(), *grads),
                (low[0].detach(), *low[1]),
                (truth[0].detach(), *truth[1]),
                strict=True,
            )
        ]
        worst[" ".join(way)] = max(ratios)
    return worst


@torch.no_grad()
def fused_deviations(ranks: int) -> dict[str, float]:
    """Of gathered keys through FlexAttention, which on CPU computes without gradients only."""
    worst = {}
    for name in ("packed", "window", "sinks and window"):
        heads = HEADS[name]
        inputs, _ = _random_attention(heads)
        documents = packed_rows(LENGTH, heads.packed)
        mesh = mesh_of(WAYS[0], ranks)
        core, model = _core(heads, mesh)
        indices = own_indices(mesh)
        local = [x[:, :, indices].float() for x in inputs[:3]]
        tokens = torch.zeros(2, len(indices), dtype=torch.int64)
        sight: Any = model.prepare(documents.select(indices), tokens, heads.window)
        mask = block_mask(sight.starts, sight.query_index, LENGTH)
        fused = core(*local, sight._replace(mask=mask))
        worst[name] = relative(fused, core(*local, sight).double())
    return worst


LONG, LONG_WINDOW = 32_768, 256


def long_rows(ranks: int, way: tuple[str, str]) -> tuple[list[Tensor], Tensor, float]:
    """Out and gradients of a long row, where its tokens stand, and the growth of memory in MiB."""
    query, key, value, grad = long_inputs()
    mesh = mesh_of(way, ranks)
    core, model = _core(Heads(kv=1), mesh)
    indices = own_indices(mesh, LONG)
    local = [x[:, :, indices].requires_grad_() for x in (query, key, value)]
    documents = Documents.from_lengths([[LONG]]).select(indices)
    visible = model.prepare(documents, indices[None], LONG_WINDOW)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out = core(*local, visible)
    grads = torch.autograd.grad(out, local, grad[:, :, indices])
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return [out.detach(), *grads], indices, growth / 1024


def long_inputs() -> list[Tensor]:
    """Query, key, value and a gradient of out, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, LONG, 4, generator=generator) for heads in (4, 1, 1, 4)]


def shards(ranks: int) -> list[Batch]:
    """This rank's part of the batch, in each way."""
    parts = [shard_batch(packed_batch(), mesh_of(way, ranks)) for way in WAYS]
    return [dataclasses.replace(part, sample_ids=(0, 1)) for part in parts]


def everything(ranks: int, compiled: bool) -> dict[str, object]:
    """All checks in one start of the ranks."""
    return {
        "attention": attention_deviations(ranks),
        "leaks": leaks(ranks),
        "decoder": decoder_deviations(ranks, compiled),
        "whole rows": whole_rows_after_the_pass(ranks),
        "low precision": low_precision_deviations(ranks),
        "fused": fused_deviations(ranks),
        "shards": shards(ranks),
    }
