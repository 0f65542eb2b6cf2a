"""Training in 8 bits follows training in bfloat16: a small Llama on real text, emulated."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from armillary.models.llama import Llama
from armillary.optim.adamw import AdamW
from armillary.parallel.config import Parallel, Scale
from armillary.parallel.materialise import materialise
from armillary.parallel.mesh import Mesh
from armillary.parallel.parallelize import parallelize
from armillary.precision import Precision
from armillary.precision.config import (
    Float8Rowwise,
    Float8RowwiseExactWeightGradient,
    Float8Tensorwise,
    LowPrecision,
    LowPrecisionConfig,
    Mxfp8,
    NoLowPrecision,
)

CPU = torch.device("cpu")
ROWS, LENGTH = 8, 64
RECIPES: list[LowPrecision] = [
    Float8Tensorwise(),
    Float8Rowwise(),
    Float8RowwiseExactWeightGradient(),
    Mxfp8(),
]


def text() -> torch.Tensor:
    """Bytes of the standard library's own sources."""
    files = sorted(Path(argparse.__file__).parent.glob("a*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def losses(config: LowPrecisionConfig, steps: int) -> list[float]:
    """Nats per byte, step by step, of one and the same run but for the format of products."""
    with torch.device("meta"):
        model = Llama(
            vocab_size=256, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=192, max_seq_len=64
        ).build()
    scale = Scale(precision=Precision(linears=config))
    mesh = Mesh.create(Parallel(device="cpu"), CPU)
    parallel = parallelize(model, mesh, scale)
    materialise(parallel, CPU, 0)
    (part,) = parallel.parts
    optimizer = torch.optim.AdamW(part.parameters(), lr=3e-3, weight_decay=AdamW().weight_decay)
    data, generator = text(), torch.Generator().manual_seed(0)
    found = []
    for _ in range(steps):
        starts = torch.randint(len(data) - LENGTH - 1, (ROWS,), generator=generator).tolist()
        rows = torch.stack([data[s : s + LENGTH + 1] for s in starts]).long()
        logits = part(rows[:, :-1])
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), rows[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def _end(values: list[float]) -> float:
    last = values[-20:]
    return sum(last) / len(last)


def test_thirty_steps_of_every_recipe_learn_as_bfloat16_does() -> None:
    wanted = losses(NoLowPrecision(), 30)
    assert wanted[-1] < 0.8 * wanted[0]
    for config in RECIPES:
        assert _end(losses(config, 30)) == pytest.approx(_end(wanted), rel=0.02), config.recipe


@pytest.mark.full
def test_losses_after_200_steps_are_within_2_percent_of_bfloat16() -> None:
    wanted = losses(NoLowPrecision(), 200)
    ends = {config.recipe: _end(losses(config, 200)) for config in RECIPES}
    print({"bfloat16": _end(wanted)} | ends)
    for recipe, end in ends.items():
        assert end == pytest.approx(_end(wanted), rel=0.02), recipe
