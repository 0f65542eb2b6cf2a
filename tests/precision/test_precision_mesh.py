"""8 bits on a mesh: over tp the scales are those of whole matrices; over data it depends."""

from __future__ import annotations

import torch
from torch import Tensor

from armillary.data.batch import Batch
from armillary.models.layers.documents import Documents
from armillary.models.llama import Llama
from armillary.parallel.config import Parallel, Scale
from armillary.parallel.materialise import materialise
from armillary.parallel.mesh import Mesh
from armillary.parallel.model import LOSS_AXES
from armillary.parallel.parallelize import parallelize
from armillary.precision import Precision
from armillary.precision.config import (
    Float8Rowwise,
    Float8RowwiseExactWeightGradient,
    Float8Tensorwise,
    LowPrecisionConfig,
    Mxfp8,
    NoLowPrecision,
)
from armillary.tasks.next_token import NextToken
from ranks import run_ranks

ROWS, LENGTH = 4, 32
CONFIGS: list[LowPrecisionConfig] = [
    NoLowPrecision(),
    Float8Tensorwise(),
    Float8Rowwise(),
    Float8RowwiseExactWeightGradient(),
    Mxfp8(),
]
Step = tuple[float, dict[str, Tensor], int]


def steps(**degrees: int) -> list[Step]:
    """Loss, whole gradients and number of converted modules of one step, by recipe; in float32."""
    torch.set_num_threads(1)
    parallel = Parallel(device="cpu", **degrees)
    return [_step(config, parallel) for config in CONFIGS]


def _step(config: LowPrecisionConfig, parallel: Parallel) -> Step:
    mesh = Mesh.create(parallel, torch.device("cpu"))
    with torch.device("meta"):
        whole = Llama(
            vocab_size=64, dim=64, n_layers=2, n_heads=2, n_kv_heads=2, ffn_dim=128, max_seq_len=64
        ).build()
    precision = Precision(compute="float32", linears=config)
    model = parallelize(whole, mesh, Scale(parallel=parallel, precision=precision))
    materialise(model, mesh.device, 0)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(64, (ROWS, LENGTH), generator=generator)
    own = slice(
        mesh.data_rank * ROWS // mesh.data_size, (mesh.data_rank + 1) * ROWS // mesh.data_size
    )
    batch = Batch(
        tokens=tokens[own],
        labels=tokens.roll(-1, 1)[own],
        documents=Documents.from_lengths([(LENGTH,)] * len(tokens[own])),
        sample_ids=tuple(range(ROWS))[own],
    )
    loss = mesh.sum_over(model.forward_backward(NextToken(), [batch]), LOSS_AXES)
    gradients = {
        name: model.gather(name, p.grad).detach().clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    converted = sum(
        type(m.product).__name__ == "LowPrecisionProduct"  # type: ignore[union-attr]
        for m in model.modules()
        if hasattr(m, "product")
    )
    return float(loss), gradients, converted


def _deviations(found: Step, wanted: Step) -> tuple[float, float]:
    """Of the loss, and the worst of any gradient's norm of the difference, relative."""
    assert found[2] == wanted[2]
    worst = max(
        float((found[1][name] - exact).norm() / exact.norm()) for name, exact in wanted[1].items()
    )
    return abs(found[0] / wanted[0] - 1), worst


def test_the_mesh_changes_what_the_documentation_says_and_no_more() -> None:
    wanted = steps()
    table = {}
    for degrees in ({"tp": 2}, {"dp_shard": 2}):
        for found in run_ranks(steps, 2, **degrees):
            for config, step, one in zip(CONFIGS, found, wanted, strict=True):
                table[next(iter(degrees)), type(config).__name__] = _deviations(step, one)
    print(table)
    for (axis, recipe), (loss, gradient) in table.items():
        assert loss < 1e-5, (axis, recipe, loss)
        # Where another order of sums takes a number over the edge of a rounding, it shows.
        assert gradient < 2e-3, (axis, recipe, gradient)
