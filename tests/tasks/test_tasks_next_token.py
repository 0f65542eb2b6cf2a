"""Next-token loss: a sum and a weight that add up however the batch is split."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from armillary.data.batch import Batch
from armillary.foundation.component import choices_of
from armillary.models.layers.documents import Documents
from armillary.models.layers.embedding import Head
from armillary.tasks.next_token import NextToken
from armillary.tasks.task import TaskConfig


class Model(nn.Module):
    """An embedding and a head that follow the decoder's contract; it keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.head = Head(6, 11, std=0.4)
        nn.init.normal_(self.head.weight, std=0.4)
        self.seen: list[Documents | None] = []

    def forward(self, tokens, documents=None, *, output=None):
        self.seen.append(documents)
        hidden = torch.tanh(self.embedding(tokens))
        return self.head(hidden, output)


def ragged_batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 11, (4, 5), generator=generator)
    labels = torch.randint(0, 11, (4, 5), generator=generator)
    labels[0, 2:] = -100
    labels[2] = -100
    return Batch(
        tokens, labels, Documents.from_lengths([(2, 3), (5,), (5,), (1, 4)]), (7, 8, 9, 10)
    )


def split(batch: Batch, rows: int) -> list[Batch]:
    parts = [slice(begin, begin + rows) for begin in range(0, len(batch.sample_ids), rows)]
    return [
        Batch(
            batch.tokens[part],
            batch.labels[part],
            Documents.from_lengths(batch.documents.lengths[part]),
            batch.sample_ids[part],
        )
        for part in parts
    ]


@pytest.mark.parametrize("chunk_tokens", [1, 3, 1024])
def test_loss_is_the_summed_cross_entropy_of_counted_labels(chunk_tokens: int) -> None:
    model, batch = Model(), ragged_batch()
    task = NextToken(chunk_tokens=chunk_tokens)
    loss = task.loss(model, batch)
    logits = model(batch.tokens).flatten(0, 1)
    expected = F.cross_entropy(logits, batch.labels.flatten(), reduction="sum", ignore_index=-100)
    torch.testing.assert_close(loss.sum, expected)
    assert loss.sum.dtype == torch.float32
    assert loss.weight.item() == task.weight(batch) == 12
    assert model.seen[0] is batch.documents
    gradients = torch.autograd.grad(loss.sum, list(model.parameters()))
    for mine, oracle in zip(
        gradients, torch.autograd.grad(expected, list(model.parameters())), strict=True
    ):
        torch.testing.assert_close(mine, oracle)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_losses_and_gradients_of_microbatches_add_up_to_the_batchs(rows: int) -> None:
    model, batch, task = Model(), ragged_batch(), NextToken()
    whole = task.loss(model, batch)
    whole.sum.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    parts = [task.loss(model, part) for part in split(batch, rows)]
    for part in parts:
        part.sum.backward()
    torch.testing.assert_close(sum(part.sum for part in parts), whole.sum)
    assert sum(part.weight for part in parts) == whole.weight
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_batch_without_labels_weighs_nothing_and_moves_nothing() -> None:
    model, batch = Model(), split(ragged_batch(), 1)[2]
    loss = NextToken().loss(model, batch)
    loss.sum.backward()
    assert (loss.sum.item(), loss.weight.item()) == (0.0, 0)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_chunks_must_hold_a_token_and_the_task_has_a_name() -> None:
    assert [p.message for p in NextToken(chunk_tokens=0).problems()] == ["task.chunk_tokens = 0"]
    assert NextToken().problems() == []
    assert choices_of(TaskConfig)["next-token"] is NextToken  # other tests bring tasks of their own
