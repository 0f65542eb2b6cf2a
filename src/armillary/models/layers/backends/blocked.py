"""Attention in blocks of queries, without ever holding all scores: the fast one on CPUs."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from armillary.foundation.errors import Problem
from armillary.kernels import blocked_attention
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

    def attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Visible) -> Tensor:
        """See `AttentionBackend.attend`."""
        return blocked_attention(query, key, value, cast("Tensor | None", visible))
