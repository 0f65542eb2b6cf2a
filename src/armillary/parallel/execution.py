"""How a batch goes through a model that one rank holds from first layer to last: in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from armillary.foundation.progress import mark
from armillary.parallel.data_sharding import set_accumulation
from armillary.parallel.mesh import Mesh

if TYPE_CHECKING:
    from armillary.data.batch import Batch
    from armillary.models.layers.cache import KeyValueCache
    from armillary.models.layers.documents import Documents
    from armillary.models.layers.embedding import Output
    from armillary.tasks.task import TaskConfig


class InTurn:
    """One microbatch after the other, each forward and backward."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._model, self._mesh = model, mesh

    def forward_backward(self, task: TaskConfig, microbatches: Sequence[Batch]) -> Tensor:
        """See `model.Executor`."""
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for index, batch in enumerate(microbatches):
            set_accumulation(self._model, self._mesh, last=index == len(microbatches) - 1)
            loss = task.loss(self._model, batch).sum
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
            mark()
        return total

    def evaluate(self, task: TaskConfig, batch: Batch) -> Tensor:
        """See `model.Executor`."""
        return task.loss(self._model, batch).sum.double()

    def __call__(
        self,
        tokens: Tensor,
        documents: Documents | None = None,
        *,
        cache: KeyValueCache | None = None,
        output: Output | None = None,
    ) -> Tensor:
        """See `model.Executor`."""
        with torch.no_grad():
            logits: Tensor = self._model(tokens, documents, cache=cache, output=output)
        return logits
