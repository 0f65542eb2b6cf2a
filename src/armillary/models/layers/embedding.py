"""Where tokens enter the residual stream and where they leave it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armillary.kernels import linear_cross_entropy
from armillary.models.layers.initializer import Initializer, truncated_normal

Output = Callable[[Tensor, "Head"], Tensor]
"""Function of hidden `[B, S, D]` and the head itself, called inside the head's forward."""


class Embedding(nn.Module):
    """One row of the weight per token; opens the residual stream in `output_dtype`."""

    vocabulary_split = True
    output_dtype: torch.dtype | None = None
    """dtype of the residual stream, set by the precision pass; None: that of the weight."""

    def __init__(self, vocab_size: int, dim: int, *, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))
        self.std = std

    def initializers(self) -> dict[str, Initializer]:
        """Initialisation of the table."""
        return {"weight": truncated_normal(self.std)}

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens `[B, S]` -> `[B, S, D]`."""
        return F.embedding(tokens, self.weight).to(self.output_dtype or self.weight.dtype)


class Head(nn.Module):
    """Logits over the vocabulary, or whatever a task makes of hidden states and the weight.

    The task's function runs inside `forward`, so that hooks which gather the weight (data
    sharding) hold around it and the logits of a whole batch need never exist.
    """

    vocabulary_split = True

    def __init__(self, dim: int, vocab_size: int, *, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))
        self.std = std

    def initializers(self) -> dict[str, Initializer]:
        """Initialisation of the weight, unless it is the embedding's."""
        return {"weight": truncated_normal(self.std)}

    def forward(self, hidden: Tensor, output: Output | None = None) -> Tensor:
        """Hidden `[B, S, D]` -> logits `[B, S, V]`, or `output(hidden, self)`."""
        return self.logits(hidden) if output is None else output(hidden, self)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden `[..., D]` -> logits `[..., V]`, in the dtype of hidden."""
        return F.linear(hidden, self.weight.to(hidden.dtype))

    def cross_entropy(
        self, hidden: Tensor, labels: Tensor, *, chunk_tokens: int, ignore_index: int
    ) -> Tensor:
        """The sum of -log softmax(logits)[label] over valid labels, an fp32 scalar.

        Args:
            hidden: `[B, S, D]`.
            labels: `[B, S]` int64; those equal to `ignore_index` count for nothing.
            chunk_tokens: tokens whose logits exist at one time.
        """
        return linear_cross_entropy(
            hidden.flatten(0, 1),
            self.weight,
            labels.flatten(),
            chunk_tokens=chunk_tokens,
            ignore_index=ignore_index,
        )
