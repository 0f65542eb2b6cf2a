"""What layers do once a step: any kind of layer that says so, and counts of one pass each."""

from __future__ import annotations

from typing import Any, cast

import torch

from armillary.models.layers.balance import STATISTICS
from armillary.models.layers.experts import Experts
from armillary.models.layers.moe import MoE
from armillary.models.layers.recompute import recomputing
from armillary.models.layers.router import Router
from armillary.models.routing import RouterConfig
from armillary.parallel import Parallel
from armillary.parallel.activation_checkpoint import checkpoint_activations
from armillary.parallel.activation_checkpoint_config import Full
from armillary.parallel.layout import Layouts
from armillary.parallel.mesh import Mesh
from armillary.parallel.model import ParallelModel, WholeModel

B, S, D, E = 2, 8, 16, 4


def moe() -> MoE:
    router = Router(D, n_experts=E, n_active=2, std=0.02, config=RouterConfig(balance_rate=0.01))
    layer = MoE(router=router, experts=Experts(D, D, n_experts=E, std=0.02, output_std=0.02))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


class Counted(torch.nn.Linear):
    """Another kind of layer that does something once a step."""

    statistics = ("rows_seen",)

    def __init__(self) -> None:
        super().__init__(D, D)
        self.rows = torch.zeros(1, dtype=torch.int64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not recomputing():
            self.rows += x.shape[0]
        return super().forward(x)

    def take_counts(self) -> torch.Tensor:
        rows, self.rows = self.rows, torch.zeros_like(self.rows)
        return rows

    def end_step(self, counts: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"rows_seen": counts[0].float()}


def test_another_kind_of_layer_is_called_at_the_end_of_a_step_and_not_counted_twice() -> None:
    layer = Counted()
    block = torch.nn.Sequential(layer, moe())
    decoder: Any = torch.nn.Module()
    decoder.layers = torch.nn.ModuleDict({"0": block})
    decoder.initializers = dict
    checkpoint_activations(decoder, Full())
    block(torch.randn(B, S, D)).sum().backward()
    whole = WholeModel.of(decoder)
    mesh = Mesh.create(Parallel(), torch.device("cpu"))
    model = ParallelModel(
        [decoder], layouts=Layouts(), mesh=mesh, whole=whole, executor=cast(Any, None)
    )
    assert whole.statistics == ("rows_seen", *STATISTICS)
    figures = model.statistics(model.end_step().tolist())
    assert tuple(figures) == whole.statistics
    assert figures["rows_seen"] == B
    assert model.statistics(model.end_step().tolist())["rows_seen"] == 0


def test_a_skipped_step_drops_its_counts_and_moves_no_bias() -> None:
    layer = moe()
    decoder: Any = torch.nn.Module()
    decoder.layers = torch.nn.ModuleDict({"0": layer})
    decoder.initializers = dict
    mesh = Mesh.create(Parallel(), torch.device("cpu"))
    model = ParallelModel(
        [decoder],
        layouts=Layouts(),
        mesh=mesh,
        whole=WholeModel.of(decoder),
        executor=cast(Any, None),
    )

    def biases_after(skipped: bool) -> list[torch.Tensor]:
        layer(torch.randn(B, S, D)).sum().backward()
        model.end_step(torch.tensor(skipped))
        return [buffer.clone() for buffer in layer.buffers()]

    before = biases_after(False)
    assert any(bias.abs().sum() > 0 for bias in before)
    assert all(map(torch.equal, before, biases_after(True)))
    after = biases_after(False)
    assert not all(map(torch.equal, before, after)), "nothing moves any more"
