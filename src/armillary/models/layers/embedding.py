"""Where tokens enter the residual stream and where they leave it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armillary.models.layers.initializer import Initializer, truncated_normal

Output = Callable[[Tensor, Tensor], Tensor]
"""Function of hidden `[B, S, D]` and the head's weight `[V, D]`, called inside the head."""


class Embedding(nn.Module):
    """One row of the weight per token; opens the residual stream in `output_dtype`."""

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

    def __init__(self, dim: int, vocab_size: int, *, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))
        self.std = std

    def initializers(self) -> dict[str, Initializer]:
        """Initialisation of the weight, unless it is the embedding's."""
        return {"weight": truncated_normal(self.std)}

    def forward(self, hidden: Tensor, output: Output | None = None) -> Tensor:
        """Hidden `[B, S, D]` -> logits `[B, S, V]`, or `output(hidden, weight)`."""
        if output is not None:
            return output(hidden, self.weight)
        return F.linear(hidden, self.weight.to(hidden.dtype))
