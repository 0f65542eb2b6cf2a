"""Ways to keep fewer activations on the device: the same gradients, and really fewer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from armillary.models.decoder import Decoder
from armillary.models.llama import Llama
from armillary.parallel import activation_checkpoint
from armillary.parallel.activation_checkpoint import (
    checkpoint_activations,
    offload_activations,
)
from armillary.parallel.activation_checkpoint_config import (
    ActivationCheckpointConfig,
    EveryK,
    Full,
    NoCheckpoint,
    Offload,
    Selective,
)
from armillary.parallel.compile import compile_blocks, set_memory_budget
from armillary.parallel.compile_config import Compile

CONFIGS = [Full(), EveryK(k=2), Selective(), Offload()]


def build() -> Decoder:
    config = Llama(vocab_size=64, dim=32, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=48)
    model = config.build()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return model


def gradients(
    config: ActivationCheckpointConfig, *, compiled: bool = False
) -> tuple[list[Tensor], int]:
    """Of a small decoder, and the bytes that autograd kept of its activations."""
    model = build()
    checkpoint_activations(model, config)
    if compiled:
        compile_blocks(model, Compile(enabled=True, backend="aot_eager"))
    offload_activations(model, config)
    kept = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    tokens = torch.arange(96).view(2, 48) % 64
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        loss = model(tokens).float().square().sum()
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None], kept


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: type(c).__name__)
def test_gradients_are_bitwise_those_of_keeping_everything(
    config: ActivationCheckpointConfig,
) -> None:
    expected, _ = gradients(NoCheckpoint())
    found, _ = gradients(config)
    assert len(found) == len(expected) > 20
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_compiled_blocks_may_keep_their_activations_on_the_host() -> None:
    expected, _ = gradients(NoCheckpoint(), compiled=True)
    found, _ = gradients(Offload(), compiled=True)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_checkpointing_keeps_less_for_the_backward_pass() -> None:
    everything, some, little = (gradients(c)[1] for c in (NoCheckpoint(), EveryK(k=2), Full()))
    assert everything > some > little > 0


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def test_selective_checkpointing_repeats_no_matrix_product_of_the_blocks() -> None:
    counts = []
    for config in (NoCheckpoint(), Selective(), Full()):
        with Products() as products:
            gradients(config)
        counts.append(products.count)
    # swiglu_linear multiplies inside its own function, of which three blocks repeat one product
    assert counts[0] <= counts[1] <= counts[0] + 3 < counts[2]


def test_offloading_moves_activations_and_leaves_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Tensor] = []
    stayed: list[Tensor] = []
    to_host = activation_checkpoint._to_host

    def watched(tensor: Tensor) -> tuple[Tensor, torch.device]:
        packed = to_host(tensor)
        (stayed if packed[0] is tensor else moved).append(tensor)
        return packed

    monkeypatch.setattr(activation_checkpoint, "_to_host", watched)
    model = build()
    offload_activations(model, Offload())
    model(torch.arange(96).view(2, 48) % 64).sum().backward()
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    assert moved and not weights & {tensor.data_ptr() for tensor in moved}
    assert all(t.data_ptr() in weights or not t.is_floating_point() for t in stayed)


@pytest.mark.full
def test_a_compiled_block_keeps_what_the_memory_budget_allows() -> None:
    kept = []
    for share in (1.0, 0.3, 0.0):
        torch._dynamo.reset()
        model = build()
        compile_blocks(model, Compile(enabled=True), memory_budget=share)
        total = 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal total
            if not isinstance(tensor, torch.nn.Parameter):
                total += tensor.numel() * tensor.element_size()
            return tensor

        tokens = torch.arange(96).view(2, 48) % 64
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            model(tokens).float().square().sum().backward()
        kept.append(total)
    set_memory_budget(1.0)
    assert kept[0] > kept[1] >= kept[2] > 0
