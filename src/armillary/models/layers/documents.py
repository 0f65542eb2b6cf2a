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
    """`[B, S]` int64: index in the row at which the token's own document starts."""

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
        """Whether every row is a single document, so that plain causal attention is right."""
        return all(len(row) == 1 for row in self.lengths)

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
        )


def copied_to(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on another device. A GPU copies from pinned memory, and nobody waits for it."""
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
