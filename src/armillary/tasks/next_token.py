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
    from armillary.models.layers.embedding import Head


@component("next-token")
@dataclass(frozen=True, kw_only=True, slots=True)
class NextToken(TaskConfig):
    """Predict each token from those before it in its document (nats, summed over labels).

    A model that in training looks one token further (`models.multi_token`) hands over twice as many
    rows. Its second loss, a mean over its own labels, is added to the gradient and not to the loss
    that is reported. (DeepSeek-V3, arXiv 2412.19437, eq. 24 and 25, depth 1)
    """

    chunk_tokens: int = 1_024
    """Tokens whose logits exist at once; the logits of the whole batch never do."""
    ahead_coefficient: float = 0.3
    """Factor of the loss of the token after the next, with models that predict it."""

    def problems(self) -> list[Problem]:
        """What is wrong with the values."""
        found = []
        if self.chunk_tokens < 1:
            found.append(Problem(f"task.chunk_tokens = {self.chunk_tokens}", "at least 1"))
        if self.ahead_coefficient < 0:
            message = f"task.ahead_coefficient = {self.ahead_coefficient}"
            found.append(Problem(message, "0 or more"))
        return found

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """See `TaskConfig.loss`. Computed inside the head, where its weight is at hand."""
        from armillary.data.batch import IGNORED
        from armillary.models.layers.auxiliary import with_loss

        def cross_entropy(hidden: Tensor, head: Head, labels: Tensor) -> Tensor:
            chunk = self.chunk_tokens
            return head.cross_entropy(hidden, labels, chunk_tokens=chunk, ignore_index=IGNORED)

        def output(hidden: Tensor, head: Head) -> Tensor:
            if hidden.shape[0] == batch.labels.shape[0]:
                return cross_entropy(hidden, head, batch.labels)
            hidden, further = hidden.chunk(2)
            ahead = cross_entropy(further, head, labels_ahead(batch))
            main = cross_entropy(hidden, head, batch.labels)
            return with_loss(main, ahead * self._ahead_factor(batch))

        total = model(batch.tokens, batch.documents, output=output)
        return Loss(sum=total, weight=(batch.labels != IGNORED).sum())

    def weight(self, batch: Batch) -> int:
        """See `TaskConfig.weight`."""
        from armillary.data.batch import IGNORED

        return int((batch.labels != IGNORED).sum())

    def weights(self, batch: Batch) -> tuple[int, ...]:
        """See `TaskConfig.weights`: labels, and labels one token further."""
        from armillary.data.batch import IGNORED

        return self.weight(batch), int((labels_ahead(batch) != IGNORED).sum())

    def within(self, weights: tuple[int, ...]) -> TaskConfig:
        """See `TaskConfig.within`."""
        main, ahead = weights
        return _Within(
            chunk_tokens=self.chunk_tokens,
            ahead_coefficient=self.ahead_coefficient,
            factor=self.ahead_coefficient * main / max(ahead, 1),
        )

    def _ahead_factor(self, batch: Batch) -> float | Tensor:
        """What the sum of the second loss is multiplied by; of this batch, as if it were all."""
        from armillary.data.batch import IGNORED

        main, ahead = ((x != IGNORED).sum() for x in (batch.labels, labels_ahead(batch)))
        return self.ahead_coefficient * main / ahead.clamp(min=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Within(NextToken):
    """Next-token prediction of a step whose weights are known."""

    factor: float = 0.0
    """Coefficient times labels, divided by labels one token further; both of the whole step."""

    def _ahead_factor(self, batch: Batch) -> float | Tensor:
        return self.factor


def labels_ahead(batch: Batch) -> Tensor:
    """`[B, S]` int64: the label of the next token, where that is in the same document."""
    from armillary.data.batch import IGNORED

    starts = batch.documents.starts
    labels = batch.labels.roll(-1, dims=1)
    labels[:, :-1].masked_fill_(starts[:, 1:] != starts[:, :-1], IGNORED)
    labels[:, -1] = IGNORED
    return labels
