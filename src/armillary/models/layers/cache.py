"""Keys and values of the tokens read so far, so that generation reads each token once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import torch
from torch import Tensor

from armillary.models.layers.documents import Documents


class LayerCache:
    """Keys and values of one block, allocated by the first token that arrives."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds key and value `[B, K, S, P]`; returns all so far, `[B, K, C, P]`."""
        if self._keys is None or self._values is None:
            self._keys, self._values = (
                new.new_empty(*new.shape[:2], self.capacity, new.shape[3]) for new in (key, value)
            )
        end = self.length + key.shape[2]
        self._keys[:, :, self.length : end] = key
        self._values[:, :, self.length : end] = value
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


class KeyValueCache:
    """What a decoder remembers of a batch of rows that grow at their right end.

    The first call may bring several documents a row (padding on the left is one); later tokens
    belong to the last document of their row, and see nothing before it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        """Columns read so far."""
        self.layers: defaultdict[str, LayerCache] = defaultdict(lambda: LayerCache(capacity))
        self._row_starts: Tensor | None = None

    def extend(
        self, tokens: Tensor, documents: Documents | None, windows: Collection[int | None] = (None,)
    ) -> tuple[Tensor, dict[int | None, Tensor]]:
        """Makes room for tokens `[B, S]`; returns their positions and a mask `[B, 1, S, C]` for
        each window (keys that a query sees at most; None: all before it).
        """
        batch, new = tokens.shape
        columns = torch.arange(self.length + new, device=tokens.device)
        own = columns[self.length :]
        if self.length + new > self.capacity:
            raise ValueError(f"cache of {self.capacity} tokens cannot hold {self.length + new}")
        if self._row_starts is None:
            starts = documents.starts if documents else torch.zeros_like(tokens)
            self._row_starts = starts[:, -1:]
        else:
            if documents is not None:
                raise ValueError("documents belong to the first call on a cache")
            starts = self._row_starts.expand(batch, new)
        self.length += new
        visible = (columns <= own[:, None]) & (columns >= starts[..., None])  # [B, S, C]
        masks: dict[int | None, Tensor] = {}
        for window in windows:
            near = visible if window is None else visible & (columns > own[:, None] - window)
            masks[window] = near[:, None]
        return own - starts, masks
