"""torch's own scaled dot-product attention, with a mask where rows hold several documents."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.foundation.errors import Problem
from armillary.models.layers.backends.base import Conditions, Visible
from armillary.models.layers.documents import Documents


class Sdpa:
    """`visible` is a mask `[B, 1, S, C]`, or None when plain causal attention is the same.

    The mask holds S² entries a row, and blocks are compiled at most twice: with and without it.
    """

    def problems(self, conditions: Conditions) -> list[Problem]:
        """See `AttentionBackend.problems`."""
        return []

    def prepare(self, documents: Documents | None, tokens: Tensor) -> Visible:
        """See `AttentionBackend.prepare`."""
        if documents is None or documents.one_per_row:
            return None
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        visible = (columns <= columns[:, None]) & (columns >= documents.starts[..., None])
        return visible[:, None]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Visible) -> Tensor:
        """See `AttentionBackend.attend`; key and value may hold more columns than the query."""
        mask = cast("Tensor | None", visible)
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
