"""A checkpoint of ours as sources, by the names of the plain model."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from armillary.checkpoint.find import Found
from armillary.checkpoint.hugging_face.source import Box, Source, Tally
from armillary.checkpoint.places.place import Place
from armillary.checkpoint.tensors import Stored, read_box, stored_tensors

_PREFIX = "model."


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """A tensor in a checkpoint, of whatever pieces."""

    place: Place = field(repr=False)
    folder: str
    stored: Stored = field(repr=False)
    tally: Tally = field(repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Source.shape`."""
        return tuple(self.stored.shape)

    @property
    def dtype(self) -> torch.dtype:
        """See `Source.dtype`."""
        return self.stored.dtype

    def read(self, box: Box) -> Tensor:
        """See `Source.read`."""
        values, count = read_box(self.place, self.folder, self.stored, box)
        self.tally.bytes_read += count
        return values


def checkpoint_sources(found: Found, tally: Tally) -> dict[str, Source]:
    """The weights in a checkpoint; optimizers' states are left alone.

    Raises:
        UserError: its index is not one of ours.
        RunError: it could not be read.
    """
    return {
        name.removeprefix(_PREFIX): CheckpointTensor(found.place, found.folder, stored, tally)
        for name, stored in stored_tensors(found.place, found.folder).items()
        if name.startswith(_PREFIX)
    }
