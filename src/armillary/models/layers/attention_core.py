"""Attention proper: from queries, keys and values to mixed values, without any projection."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from armillary.models.layers.backends import BACKENDS, Visible, backend_for
from armillary.models.layers.cache import LayerCache
from armillary.models.layers.initializer import ZEROS, Initializer


class AttentionCore(nn.Module):
    """What mixes tokens; all of attention that context parallelism replaces.

    It has no weights, except for an optional *sink* per head: a learned logit in the denominator of
    the softmax, which lets a head look at nothing. (GPT-OSS, arXiv 2508.10925, section 2.2)
    """

    def __init__(
        self,
        head_dim: int,
        *,
        backend: str = "auto",
        window: int | None = None,
        scale: float | None = None,
        sink_heads: int = 0,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.backend = backend
        self.window = window
        """Keys that a query sees at most, itself included (tokens); None: all before it."""
        self.scale = scale
        """Factor of the scores; None: 1 / sqrt(P)."""
        self.sinks = nn.Parameter(torch.empty(sink_heads)) if sink_heads else None

    def initializers(self) -> dict[str, Initializer]:
        """Initialisation of the sinks."""
        return {"sinks": ZEROS}

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visible: Visible,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Query `[B, H, S, P]`, key `[B, K, S, P]` and value `[B, K, S, Pv]` -> `[B, H, S, Pv]`.

        With a cache, key and value are added to it and `visible` is a mask over all its columns.
        """
        if cache is None:
            return self.attend(query, key, value, visible)
        key, value = cache.append(key, value)
        sdpa = BACKENDS["sdpa"]
        return sdpa.attend(query, key, value, visible, scale=self.scale, sinks=self.sinks)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visible: Visible,
        heads: slice = slice(None),
    ) -> Tensor:
        """As `forward`, without a cache; `heads`: which of the heads here the queries are."""
        backend = backend_for(self.backend, query.device.type, self.head_dim)
        sinks = None if self.sinks is None else self.sinks[heads]
        return backend.attend(query, key, value, visible, scale=self.scale, sinks=sinks)
