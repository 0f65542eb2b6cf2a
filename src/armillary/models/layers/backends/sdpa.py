"""torch's own scaled dot-product attention, with a mask where rows hold several documents."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.foundation.errors import Problem
from armillary.models.layers.backends.base import Conditions, Visible
from armillary.models.layers.documents import Documents

_CHANNELS = 8
"""Channels added for sinks, of which one is needed: fused kernels ask for widths in eights."""


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
        """See `AttentionBackend.attend`; key and value may hold more columns than the query."""
        mask = cast("Tensor | None", visible)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if sinks is not None:
            own = (sinks / scale).to(query.dtype)
            query, key, value, mask = _with_sinks(query, key, value, mask, own)
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=grouped,
        )


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One key more, that all queries see and whose value is 0; its products with queries are the
    sinks `[H]`.

    Queries and keys get a channel of their own for it, so that one mask serves all heads.
    """
    batch, _, length, _ = query.shape
    if mask is None:
        mask = torch.ones(length, key.shape[2], dtype=torch.bool, device=query.device).tril()
    own = F.pad(sinks[:, None], (0, _CHANNELS - 1))[:, None].expand(batch, -1, length, -1)
    query = torch.cat((query, own), dim=-1)  # [B, H, S, P + 8]
    key = F.pad(key, (0, _CHANNELS, 0, 1))  # [B, K, C + 1, P + 8]
    key[:, :, -1, -_CHANNELS] = 1
    return query, key, F.pad(value, (0, 0, 0, 1)), F.pad(mask, (0, 1), value=True)
