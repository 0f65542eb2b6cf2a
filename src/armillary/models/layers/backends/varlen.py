"""torch's variable-length attention: documents as separate sequences of one flat batch."""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from armillary.foundation.errors import Problem, UserError
from armillary.models.layers.backends.base import Conditions, Visible
from armillary.models.layers.documents import Documents

_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether this torch's varlen_attn shares key heads by itself: 2.12 and 2.13 do."""


class Varlen:
    """`visible` is the documents' cumulative lengths, padded to a power of two. CUDA, 16 bit."""

    def problems(self, conditions: Conditions) -> list[Problem]:
        """See `AttentionBackend.problems`."""
        return _limits(conditions.device_type, conditions.compute_dtype)

    def prepare(self, documents: Documents | None, tokens: Tensor) -> Visible:
        """See `AttentionBackend.prepare`; documents of no tokens fill up to the power of two."""
        batch, length = tokens.shape
        if documents is None:
            documents = Documents.from_lengths([[length]] * batch, tokens.device)
        ends = documents.cumulative_lengths()
        padded = 1 << (ends.numel() - 1).bit_length()
        return F.pad(ends, (0, padded - ends.numel()), value=batch * length)

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
        if problems := _limits(query.device.type, str(query.dtype).removeprefix("torch.")):
            raise UserError(problems)
        if sinks is not None or key.shape[-1] != value.shape[-1]:
            raise UserError(_cannot("it has no sinks, and values are as wide as keys"))
        options: dict[str, Any] = {"window_size": (-1, 0)}  # all before, none after: causal
        if scale is not None:
            options["scale"] = scale
        groups = query.shape[1] // key.shape[1]
        if groups > 1 and _GROUPS:
            options["enable_gqa"] = True
        elif groups > 1:
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        batch, heads, length, width = query.shape
        ends = cast("Tensor", visible)
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # [T, H, P]
        out = varlen_attn(q, k, v, ends, ends, length, length, **options)
        return cast("Tensor", out).view(batch, length, heads, width).transpose(1, 2)


def _limits(device_type: str, dtype: str) -> list[Problem]:
    if device_type != "cuda":
        return [_cannot(f"there is no kernel for {device_type}")]
    if dtype not in ("bfloat16", "float16"):
        return [_cannot(f"its kernel computes in 16 bit, not in {dtype}")]
    return []


def _cannot(why: str) -> Problem:
    message = f"model.attention = varlen cannot run here: {why}"
    return Problem(message, "auto, blocked, sdpa, flex", "--model.attention auto")
