"""Embedding, logits and loss over a vocabulary that is cut over ranks.

The vocabulary need not divide: the last ranks may hold fewer words than the others, or none.
(The idea is section 3 of Shoeybi et al. 2019, arXiv 1909.08053; loss over shards of logits.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.models.layers.embedding import Embedding, Head
from armillary.parallel.collectives import all_gather_copies, all_reduce, maximum
from armillary.parallel.tensor.region import TensorRanks


@dataclass(frozen=True, slots=True)
class Words:
    """The words of the vocabulary that a rank holds."""

    first: int
    count: int

    def local(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Which tokens are held here, and their row here; 0 for those that are not."""
        rows = tokens - self.first
        here = (rows >= 0) & (rows < self.count)
        return here, rows.masked_fill(~here, 0)


def words_of(rank: int, ranks: int, vocabulary: int) -> Words:
    """The words of a rank, as `torch.chunk` deals them."""
    most = -(-vocabulary // ranks)
    first = min(rank * most, vocabulary)
    return Words(first, min(most, vocabulary - first))


def split_embedding(embedding: Embedding, ranks: TensorRanks, vocabulary: int) -> None:
    """Makes an embedding whose rows are cut look up its own, and add up what all ranks found.

    Exactly one rank has each token's row, so the sum is exact in any format.
    """
    words = words_of(ranks.rank, ranks.size, vocabulary)

    def forward(tokens: Tensor) -> Tensor:
        """Tokens `[B, S]` -> this rank's share of hidden, `[B, S/R, D]`."""
        weight = embedding.weight
        here, rows = words.local(tokens)
        # An empty table is padded, so that its gradient exists and is empty, as a table's should.
        table = weight if words.count else F.pad(weight, (0, 0, 0, 1))
        found = F.embedding(rows, table).masked_fill(~here[..., None], 0.0)
        return ranks.leave(found.to(embedding.output_dtype or weight.dtype))

    embedding.forward = forward  # type: ignore[method-assign]


def split_head(head: Head, ranks: TensorRanks, vocabulary: int) -> None:
    """Makes a head whose rows are cut compute logits and loss from the logits of all ranks."""
    words = words_of(ranks.rank, ranks.size, vocabulary)
    most = words_of(0, ranks.size, vocabulary).count

    def logits(hidden: Tensor) -> Tensor:
        """Share of hidden `[..., S/R, D]` -> all logits `[..., S, V]`, the same on every rank."""
        hidden = ranks.enter(hidden)
        own = F.linear(hidden, head.weight.to(hidden.dtype))
        padded = F.pad(own, (0, most - words.count))
        return all_gather_copies(padded, -1, ranks.group)[..., :vocabulary]

    def cross_entropy(
        hidden: Tensor, labels: Tensor, *, chunk_tokens: int, ignore_index: int
    ) -> Tensor:
        """Share of hidden `[B, S/R, D]` and all labels `[B, S]` -> the whole sum, on every rank."""
        assert ranks.group is not None
        return vocabulary_cross_entropy(
            ranks.enter(hidden).flatten(0, 1),
            head.weight,
            labels.flatten(),
            words=words,
            group=ranks.group,
            chunk_tokens=chunk_tokens,
            ignore_index=ignore_index,
        )

    head.logits = logits  # type: ignore[method-assign]
    head.cross_entropy = cross_entropy  # type: ignore[method-assign]


def vocabulary_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    words: Words,
    group: str,
    chunk_tokens: int = 1024,
    ignore_index: int = -100,
) -> Tensor:
    """The sum over valid labels of -log softmax(hidden weightᵀ)[label], the same on every rank.

    `kernels.linear_cross_entropy` over ranks. Of a chunk's logits each rank holds those of its
    words; the ranks agree on the largest one, and add up exponentials and labels' logits: three
    numbers a token are communicated. The gradient of `hidden` is this rank's part of a sum over
    ranks, which `all_gather` makes where hidden was gathered.

    Args:
        hidden: `[T, D]`, the same on every rank.
        weight: `[count, D]`, the rows of this rank's words.
        labels: `[T]` int64 of the whole vocabulary; `ignore_index` counts for nothing.
        words: which words those rows are.
        group: name of the group that shares the vocabulary.
        chunk_tokens: tokens whose logits exist at one time.
        ignore_index: the label that is none.
    """
    wanted = torch.is_grad_enabled()  # always off inside an autograd function
    shard = _Shard(words, group, ignore_index)
    loss: Tensor = _VocabularyCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, chunk_tokens, shard, wanted
    )
    return loss


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Computes the gradients beside the loss, while a chunk's logits exist."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk: int,
        shard: _Shard,
        wanted: bool,
    ) -> Tensor:
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        low_weight = weight.to(hidden.dtype)
        want_hidden, want_weight = (wanted and needed for needed in ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if want_weight else None
        loss = torch.zeros((), dtype=exact, device=hidden.device)
        for begin in range(0, hidden.shape[0], chunk):
            tokens = slice(begin, begin + chunk)
            logits = hidden[tokens] @ low_weight.mT  # [C, count]
            part, grad_logits = shard.loss(logits.to(exact), labels[tokens])
            loss += part
            if not (want_hidden or want_weight):
                continue
            grad_low = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[tokens] = grad_low @ low_weight
            if grad_weight is not None:
                grad_weight += grad_low.mT @ hidden[tokens]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        factor = grad[None]  # with a dim, so that a bf16 gradient is scaled in fp32
        if grad_hidden is not None:
            grad_hidden = (grad_hidden * factor).to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * factor).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None


@dataclass(frozen=True, slots=True)
class _Shard:
    """A rank's words, and how to agree with the ranks that hold the others."""

    words: Words
    group: str
    ignore_index: int

    def loss(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Summed loss of a chunk, and the gradient of own logits `[C, count]`, which are used up.

        With m the largest logit, -log softmax(x)[y] = log Σ exp(x - m) - (x[y] - m).
        """
        if not self.words.count:
            logits = logits.new_full((logits.shape[0], 1), -torch.inf)  # weighs nothing in any sum
        ignored = labels == self.ignore_index
        here, column = self.words.local(labels)
        here = here & ~ignored
        column = column.masked_fill(ignored, 0)[:, None]
        logits -= maximum(logits.amax(dim=-1), self.group)[:, None]
        target = logits.gather(1, column).squeeze(1).masked_fill_(~here, 0.0)
        exponentials = logits.exp_()
        sums = torch.stack((exponentials.sum(dim=-1), target))  # [2, C]
        sums = all_reduce(sums, self.group)
        loss = (sums[0].log() - sums[1]).masked_fill_(ignored, 0.0).sum()
        grad = exponentials.div_(sums[0][:, None])  # softmax
        grad.scatter_add_(1, column, -here.to(grad.dtype)[:, None])
        grad.masked_fill_(ignored[:, None], 0.0)
        return loss, grad[:, : self.words.count]
