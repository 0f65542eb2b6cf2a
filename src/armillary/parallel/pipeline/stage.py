"""What a stage of a pipeline is, and its part of a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from armillary.foundation.progress import mark
from armillary.models.decoder import Decoder, DecoderContext
from armillary.models.layers.cache import KeyValueCache
from armillary.models.layers.documents import Documents
from armillary.models.layers.embedding import Output


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """The place of a part of a model in its pipeline."""

    index: int
    """Counted from the embedding."""
    ranks: tuple[int, ...]
    """Pipeline rank of every stage of the pipeline."""
    width: int
    """D, of the residual stream that passes between stages."""
    dtype: torch.dtype
    """Format of the residual stream."""
    tied: bool
    """Whether the head of the whole model uses the embedding's weight."""

    @property
    def is_first(self) -> bool:
        """Whether it embeds the tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the head."""
        return self.index == len(self.ranks) - 1

    @property
    def source(self) -> int | None:
        """Pipeline rank that its input comes from; None: none, or this rank itself."""
        return None if self.is_first else self._other(self.index - 1)

    @property
    def target(self) -> int | None:
        """Pipeline rank that its result goes to; None: none, or this rank itself."""
        return None if self.is_last else self._other(self.index + 1)

    def _other(self, index: int) -> int | None:
        rank = self.ranks[index]
        return None if rank == self.ranks[self.index] else rank


def stage_of(part: nn.Module) -> Stage:
    """The place of a part of a model."""
    stage = vars(part)["stage"]
    assert isinstance(stage, Stage)
    return stage


def set_stage(part: nn.Module, stage: Stage) -> None:
    """Remembers the place of a part with it, as plain data."""
    vars(part)["stage"] = stage


@dataclass(frozen=True, slots=True)
class Work:
    """One microbatch on its way through the stages."""

    tokens: Tensor
    """`[B, S]` that this rank holds."""
    documents: Documents | None
    """How rows are packed."""
    finish: Callable[[Any], Tensor]
    """What the last stage makes of a model, which it calls once as if it were whole."""
    cache: KeyValueCache | None = None
    """What this stage has read before."""


class StageForward:
    """The forward pass of a part, in the place of the decoder's own.

    The last stage runs all that the task does, so that hooks around the part (data sharding) hold
    for the head too; to the task it looks like the whole model.
    """

    def __init__(self, part: Decoder) -> None:
        self._part = part
        self._stage = stage_of(part)
        self.works: Iterator[Work] = iter(())
        """Microbatches of the calls to come, in their order."""

    def __call__(self, received: Tensor) -> Tensor:
        """The residual stream `[B, S, D]` after this stage, or what the last one makes of it.

        Args:
            received: the residual stream so far; the first stage ignores it.
        """
        mark()
        part, work = self._part, next(self.works)
        context = part.context(work.tokens, work.documents, work.cache)
        hidden: Tensor = part.embedding(work.tokens) if self._stage.is_first else received
        if self._stage.is_last:
            return work.finish(_RestOfModel(part, hidden, context, work.cache))
        hidden = part.run(hidden, context, work.cache)
        # A schedule asks each stage for gradients, also a first one of which nothing is trained.
        return hidden.requires_grad_() if torch.is_grad_enabled() else hidden


@dataclass(frozen=True, slots=True)
class _RestOfModel:
    """Looks like the whole decoder to a task, of which most has been computed already."""

    part: Decoder
    hidden: Tensor
    context: DecoderContext
    cache: KeyValueCache | None

    def __call__(
        self,
        tokens: Tensor,
        documents: Documents | None = None,
        *,
        cache: KeyValueCache | None = None,
        output: Output | None = None,
    ) -> Tensor:
        """See `Decoder.forward`; tokens and documents are those that the stages began with."""
        hidden = self.part.run(self.hidden, self.context, self.cache)
        result: Tensor = self.part.head(self.part.norm(hidden), output)
        return result
