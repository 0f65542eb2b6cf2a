"""Attention in blocks of queries, without ever holding all scores: the fast one on CPUs."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from armillary.foundation.errors import Problem
from armillary.kernels import attention_with_sinks, blocked_attention, partial_attention
from armillary.models.layers.backends.base import Conditions, Visible
from armillary.models.layers.documents import Documents


class Blocked:
    """Our own kernel; `visible` is the documents' `starts`. Runs everywhere."""

    def problems(self, conditions: Conditions) -> list[Problem]:
        """See `AttentionBackend.problems`."""
        return []

    def prepare(self, documents: Documents | None, tokens: Tensor) -> Visible:
        """See `AttentionBackend.prepare`."""
        return documents.starts if documents else None

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
        """See `AttentionBackend.attend`."""
        starts = cast("Tensor | None", visible)
        if sinks is None and key.shape[-1] == value.shape[-1]:
            return blocked_attention(query, key, value, starts, scale)
        index = torch.arange(query.shape[2], device=query.device)
        out, lse = partial_attention(query, key, value, index, index, starts=starts, scale=scale)
        return out if sinks is None else attention_with_sinks(out, lse, sinks)
