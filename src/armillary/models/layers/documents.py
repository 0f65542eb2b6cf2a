"""Where packed documents begin and end: the one source that masks and positions come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Documents:
    """Documents packed side by side in the rows of a batch.

    `lengths` stays on the host, so nothing has to ask the device how a batch is cut up; the two
    tensors have a shape that does not depend on the cut, so compiled blocks serve every batch.
    """

    lengths: tuple[tuple[int, ...], ...]
    """Tokens of each document, row by row; every row sums to S."""
    positions: Tensor
    """`[B, S]` int64: index of the token in its own document."""
    starts: Tensor
    """`[B, S]` int64: index in the row at which the token's own document starts, or, within a
    sliding window, of the first token it sees."""
    indices: Tensor | None = None
    """`[S]` int64: index in the whole row of each token held here; None: all of the row, in order.
    """
    windowed: bool = False
    """Whether a sliding window hides a part of the documents."""

    @classmethod
    def whole_rows(cls, tokens: Tensor) -> Documents:
        """Each row of tokens `[B, S]` as one document."""
        batch, length = tokens.shape
        positions = torch.arange(length, device=tokens.device).expand(batch, length)
        return cls(((length,),) * batch, positions, torch.zeros_like(positions))

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[Sequence[int]], device: torch.device | str = "cpu"
    ) -> Documents:
        """Documents of these lengths, row by row.

        Raises:
            ValueError: rows of different sums, an empty row, a document without tokens.
        """
        rows = tuple(tuple(int(length) for length in row) for row in lengths)
        totals = {sum(row) for row in rows}
        if len(totals) != 1:
            raise ValueError(f"rows must hold equally many tokens, not {sorted(totals)}")
        if min(min(row, default=0) for row in rows) < 1:
            raise ValueError("every row needs a document, and every document a token")
        starts = np.stack([np.repeat(np.cumsum((0, *row[:-1])), row) for row in rows])
        positions = np.arange(totals.pop()) - starts
        return cls(
            lengths=rows,
            positions=torch.from_numpy(positions).to(device, non_blocking=True),
            starts=torch.from_numpy(starts).to(device, non_blocking=True),
        )

    @property
    def one_per_row(self) -> bool:
        """Whether every query sees all of its row before it, so that plain causal attention is
        right."""
        return not self.windowed and all(len(row) == 1 for row in self.lengths)

    def select(self, indices: Tensor) -> Documents:
        """What a rank needs that holds only the tokens at `indices` `[S]` of whole rows."""
        assert self.indices is None, "documents are cut once"
        positions, starts = (x[:, indices] for x in (self.positions, self.starts))
        return Documents(self.lengths, positions, starts, indices, self.windowed)

    def whole(self) -> Documents:
        """The documents of whole rows again, from their lengths."""
        return Documents.from_lengths(self.lengths, self.starts.device)

    def within(self, window: int) -> Documents:
        """The same documents where each query sees the last `window` keys only, its own included.

        (Sliding-window attention: Beltagy et al. 2020, arXiv 2004.05150, section 3.1)
        """
        own = self.indices
        if own is None:
            own = torch.arange(self.starts.shape[1], device=self.starts.device)
        starts = torch.maximum(self.starts, own - (window - 1))
        return Documents(self.lengths, self.positions, starts, self.indices, windowed=True)

    def cumulative_lengths(self) -> Tensor:
        """`[N + 1]` int32: where documents start in the flattened tokens, and the end."""
        flat = [length for row in self.lengths for length in row]
        ends = torch.from_numpy(np.cumsum((0, *flat)).astype(np.int32))
        return ends.to(self.starts.device, non_blocking=True)

    def to(self, device: torch.device | str) -> Documents:
        """The same documents with their tensors on `device`."""
        return Documents(
            self.lengths,
            copied_to(self.positions, device),
            copied_to(self.starts, device),
            None if self.indices is None else copied_to(self.indices, device),
            self.windowed,
        )


def copied_to(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on another device. A GPU copies from pinned memory, and nobody waits for it."""
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
