"""What an attention backend is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from torch import Tensor

from armillary.foundation.errors import Problem
from armillary.models.layers.documents import Documents

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Visible: TypeAlias = "Tensor | BlockMask | None"
"""Which keys each query sees, in the form its backend reads; the same object for every block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """Under what attention is to be computed; all of it is known before a tensor exists."""

    device_type: str
    """cpu, cuda, ..."""
    compute_dtype: str = "bfloat16"
    """Name of the dtype of queries, keys and values."""
    head_width: int
    """P."""
    training: bool = True
    """Whether gradients are wanted."""


class AttentionBackend(Protocol):
    """Causal attention that stays inside documents; every backend computes the same numbers.

    `prepare` runs once per forward pass, outside compiled blocks, and turns documents into what
    `attend` reads; its result has a type and shape that do not depend on how rows are cut.
    """

    def problems(self, conditions: Conditions) -> list[Problem]:
        """Why this backend cannot run so; empty if it can."""

    def prepare(self, documents: Documents | None, tokens: Tensor) -> Visible:
        """What queries at tokens `[B, S]` see; None: each row is one document."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visible: Visible,
        *,
        scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Query `[B, H, S, P]`, key `[B, K, S, P]`, value `[B, K, S, Pv]` -> `[B, H, S, Pv]`.

        Args:
            query: what looks.
            key: what is looked at.
            value: what is seen there; Pv may differ from P.
            visible: which keys each query sees.
            scale: factor of the scores; None: 1 / sqrt(P).
            sinks: `[H]`, a logit per head in the denominator of the softmax; None: no such.
        """
