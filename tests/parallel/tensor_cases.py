"""A tiny decoder whole and split over tensor ranks, for comparison."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from armillary.models import Llama, Qwen3
from armillary.models.config import ModelConfig
from armillary.models.decoder import Decoder
from armillary.models.layers.attention import Attention
from armillary.models.layers.documents import Documents
from armillary.models.layers.linear import Linear
from armillary.parallel.collectives import all_gather, all_reduce, group_name
from armillary.parallel.config import Parallel
from armillary.parallel.experts.expert_parallel import split_experts
from armillary.parallel.layout import Layouts, local_ranges
from armillary.parallel.mesh import Mesh
from armillary.parallel.tensor.tensor_parallel import split_tensors
from moe_cases import MOE_FAMILIES

VOCABULARY, ROWS, LENGTH = 251, 3, 24
"""A vocabulary that divides by nothing."""

SIZES = {
    "vocab_size": VOCABULARY, "dim": 48, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4,
    "head_dim": 6, "ffn_dim": 40, "max_seq_len": 64,
}  # fmt: skip
LLAMA = Llama(**SIZES)
QWEN3 = Qwen3(**SIZES)
TIED = replace(QWEN3, tied_embeddings=True)
FAMILIES: dict[str, ModelConfig] = {
    name: replace(MOE_FAMILIES[name], vocab_size=VOCABULARY)
    for name in ("qwen3-moe", "deepseek v3", "gpt-oss")
}
FAMILIES["deepseek v3"] = replace(FAMILIES["deepseek v3"], predict_ahead=True)  # type: ignore


@dataclass(frozen=True)
class Setting:
    """What a comparison varies."""

    config: ModelConfig = field(default_factory=lambda: LLAMA)
    asynchronous: bool = False
    biased: bool = False
    dtype: torch.dtype = torch.float32


def mesh_of(setting: Setting, ranks: int) -> Mesh:
    """All ranks share every matrix."""
    parallel = Parallel(tp=ranks, dp_shard=1, asynchronous_tp=setting.asynchronous)
    return Mesh.create(parallel, torch.device("cpu"))


def whole_model(setting: Setting, seed: int = 0) -> Decoder:
    """The model in one piece, with values that differ from their initial ones everywhere."""
    model = _built(setting)
    model.to_empty(device="cpu")
    if _is_tied(setting):
        model.head.weight = model.embedding.weight
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            around = 1.0 if "norm" in name else 0.0
            parameter.normal_(around, 0.2, generator=generator)
        for buffer in model.buffers():
            buffer.normal_(0.0, 0.1, generator=generator)
    return model


def split_model(setting: Setting, mesh: Mesh, whole: Decoder) -> tuple[Decoder, Layouts]:
    """This rank's part, with the values of the whole one."""
    model = _built(setting)
    layouts = Layouts.of(model)
    split_experts(model, mesh, layouts)
    split_tensors(model, mesh, layouts)
    model.to_empty(device="cpu")
    if _is_tied(setting):
        model.head.weight = model.embedding.weight
    values = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            ranges = local_ranges(layouts.layout(name), mesh)
            parameter.copy_(values[name][tuple(slice(*indices) for indices in ranges)])
        for name, buffer in model.named_buffers():
            buffer.copy_(whole.get_buffer(name))
    return model, layouts


def batch(seed: int = 1, length: int = LENGTH) -> tuple[Tensor, Tensor, Documents]:
    """Tokens, labels of which each row has another number, and packed documents."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = (
        torch.randint(VOCABULARY, (ROWS, length), generator=generator) for _ in range(2)
    )
    for row in range(ROWS):
        labels[row, length - 5 * row - 1 :] = -100
    labels[0, 3:9] = -100
    lengths = [(length,), (5, length - 5), (1, 9, length - 10)]
    return tokens, labels, Documents.from_lengths(lengths)


def loss_of(model: nn.Module, chunk_tokens: int = 17) -> Tensor:
    """Of the one batch, in chunks that do not divide it."""
    tokens, labels, documents = batch()
    loss: Tensor = model(
        tokens,
        documents,
        output=lambda hidden, head: head.cross_entropy(
            hidden,
            labels.repeat(hidden.shape[0] // ROWS, 1),  # twice as many rows that look ahead
            chunk_tokens=chunk_tokens,
            ignore_index=-100,
        ),
    )
    return loss


def whole_gradients(model: nn.Module, layouts: Layouts, mesh: Mesh) -> dict[str, Tensor]:
    """Gradients as one process has them: partial ones summed, parts joined."""
    group = group_name(mesh.group("tp"))
    gradients = {}
    for name, parameter in model.named_parameters():
        layout, gradient = layouts.layout(name), parameter.grad
        assert gradient is not None, name
        if layout.view == "expert":  # data sharding adds these up, over all ranks
            gradients[name] = all_reduce(gradient, group)
            continue
        assert ("tp" in layout.split_axes) != ("tp" in layout.partial), name
        for _, dim in layout.splits:
            most = -(-layout.shape[dim] // mesh.degree("tp"))
            padding = [0, 0] * (gradient.dim() - dim)
            padding[-1] = most - gradient.shape[dim]
            padded = nn.functional.pad(gradient, padding)
            gradient = all_gather(padded, dim, group).narrow(dim, 0, layout.shape[dim])
        gradients[name] = all_reduce(gradient, group) if layout.partial else gradient
    return gradients


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference as a share of the largest expected value."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())


def _built(setting: Setting) -> Decoder:
    with torch.device("meta"):
        model = setting.config.build()
        if setting.biased:
            for module in model.modules():
                if isinstance(module, Attention):
                    for linear in (module.query, module.key, module.value, module.output):
                        _give_bias(linear)
    model.embedding.output_dtype = setting.dtype
    return model


def _is_tied(setting: Setting) -> bool:
    return bool(getattr(setting.config, "tied_embeddings", False))


def _give_bias(linear: Linear) -> None:
    linear.bias = nn.Parameter(torch.empty(linear.weight.shape[0]))
