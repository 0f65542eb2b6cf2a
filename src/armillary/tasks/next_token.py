"""Next-token prediction: the cross-entropy of each label given the tokens before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from armillary.foundation.component import component
from armillary.foundation.errors import Problem
from armillary.tasks.task import Loss, TaskConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

    from armillary.data.batch import Batch


@component("next-token")
@dataclass(frozen=True, kw_only=True, slots=True)
class NextToken(TaskConfig):
    """Predict each token from those before it in its document (nats, summed over labels)."""

    chunk_tokens: int = 1_024
    """Tokens whose logits exist at once; the logits of the whole batch never do."""

    def problems(self) -> list[Problem]:
        """What is wrong with the values."""
        if self.chunk_tokens >= 1:
            return []
        return [Problem(f"task.chunk_tokens = {self.chunk_tokens}", "at least 1")]

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """See `TaskConfig.loss`. The head's weight is used inside the head, where it is whole."""
        from armillary.data.batch import IGNORED
        from armillary.kernels import linear_cross_entropy

        def cross_entropy(hidden: Tensor, weight: Tensor) -> Tensor:
            return linear_cross_entropy(
                hidden.flatten(0, 1),  # [T, D]
                weight,  # [V, D]
                batch.labels.flatten(),  # [T]
                chunk_tokens=self.chunk_tokens,
                ignore_index=IGNORED,
            )

        total = model(batch.tokens, batch.documents, output=cross_entropy)
        return Loss(sum=total, weight=(batch.labels != IGNORED).sum())

    def weight(self, batch: Batch) -> int:
        """See `TaskConfig.weight`."""
        from armillary.data.batch import IGNORED

        return int((batch.labels != IGNORED).sum())
