"""Tiny models with real random weights, shared by the tests of models and inference."""

from __future__ import annotations

from dataclasses import replace

import torch

from armillary.models import Llama, Llama31RopeScaling, Qwen3
from armillary.models.decoder import Decoder
from armillary.models.dense import DenseDecoder

TINY = {
    "vocab_size": 61, "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48,
    "max_seq_len": 512,
}  # fmt: skip
SCALING = Llama31RopeScaling(factor=4.0, original_max_seq_len=64)
FAMILIES: dict[str, DenseDecoder] = {
    "llama": Llama(**TINY, rope_scaling=SCALING),
    "llama tied": Llama(**TINY, tied_embeddings=True),
    "qwen3": Qwen3(**TINY, head_dim=16, tied_embeddings=True),
}


def build(config: DenseDecoder, *, attention: str = "auto", seed: int = 0) -> Decoder:
    """The model with weights large enough that every part of it shows in the logits."""
    torch.set_num_threads(1)
    model = replace(config, attention=attention).build()  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            around = 1.0 if "norm" in name else 0.0
            parameter.normal_(around, 0.2, generator=generator)
    return model


def random_tokens(*shape: int, seed: int = 0, vocab_size: int = 61) -> torch.Tensor:
    """Token ids of this shape."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, shape, generator=generator)


def relative_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference as a share of the largest expected value."""
    ours, theirs = ours.detach(), theirs.detach()
    return float((ours - theirs).abs().max() / theirs.abs().max())
