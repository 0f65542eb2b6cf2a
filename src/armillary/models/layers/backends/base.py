"""What an attention backend is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

from torch import Tensor

from armillary.foundation.errors import Problem
from armillary.models.layers.documents import Documents

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Visible: TypeAlias = "Tensor | BlockMask | None"
"""Which keys each query sees, in the form its backend reads; the same object for every block."""


class AttentionBackend(Protocol):
    """Causal attention that stays inside documents; every backend computes the same numbers.

    `prepare` runs once per forward pass, outside compiled blocks, and turns documents into what
    `attend` reads; its result has a type and shape that do not depend on how rows are cut.
    """

    def problems(self, device_type: str, *, training: bool) -> list[Problem]:
        """Why this backend cannot run on such a device; empty if it can."""

    def prepare(self, documents: Documents | None, tokens: Tensor) -> Visible:
        """What queries at tokens `[B, S]` see; None: each row is one document."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Visible) -> Tensor:
        """Query `[B, H, S, P]`, key and value `[B, K, S, P]` -> `[B, H, S, P]`."""
