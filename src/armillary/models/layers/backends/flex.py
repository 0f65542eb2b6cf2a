"""torch's FlexAttention: the mask is a function, and blocks that see nothing are skipped."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from armillary.foundation.errors import Problem, UserError
from armillary.kernels import attention_with_sinks
from armillary.models.layers.backends.base import Conditions, Visible
from armillary.models.layers.documents import Documents

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class Flex:
    """`visible` is a BlockMask. On CPU it runs without gradients only (a limit of torch)."""

    def problems(self, conditions: Conditions) -> list[Problem]:
        """See `AttentionBackend.problems`."""
        if conditions.device_type == "cpu" and conditions.training:
            return [_NO_GRADIENTS_ON_CPU]
        if conditions.device_type != "cuda":
            return []
        if importlib.util.find_spec("triton") is None:
            message = "model.attention = flex needs triton on cuda, which is not installed"
            return [Problem(message, "auto, sdpa, varlen", "--model.attention auto")]
        if conditions.head_width < _LEAST_HEAD_WIDTH:
            message = (
                f"model.attention = flex needs heads of {_LEAST_HEAD_WIDTH} or wider on cuda, and "
                f"they are {conditions.head_width} wide"
            )
            return [Problem(message, "auto, blocked, sdpa", "--model.attention auto")]
        return []

    def prepare(self, documents: Documents | None, tokens: Tensor) -> Visible:
        """See `AttentionBackend.prepare`."""
        starts = documents.starts if documents else torch.zeros_like(tokens)
        batch, length = tokens.shape

        def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (key >= starts[row, query])

        create = _compiled_create() if tokens.is_cuda else create_block_mask
        mask: BlockMask = create(visible, batch, None, length, length, device=tokens.device)
        return mask

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
        if query.device.type == "cpu" and query.requires_grad:
            raise UserError(_NO_GRADIENTS_ON_CPU)
        mask, grouped = cast("BlockMask", visible), query.shape[1] != key.shape[1]
        attention: Callable[..., Any] = flex_attention
        if query.is_cuda:
            attention = _compiled_attention()
        options = {"block_mask": mask, "scale": scale, "enable_gqa": grouped}
        if sinks is None:
            out: Tensor = attention(query, key, value, **options)
            return out
        mixed, extra = attention(query, key, value, return_aux=AuxRequest(lse=True), **options)
        return attention_with_sinks(mixed, extra.lse, sinks)


_LEAST_HEAD_WIDTH = 16
"""Narrower ones are refused (torch/_inductor/kernel/flex/flex_attention.py)."""
_NO_GRADIENTS_ON_CPU = Problem(
    "model.attention = flex cannot train on cpu: torch's FlexAttention has no backward pass there",
    "auto, blocked, sdpa",
    "--model.attention auto",
)


@functools.cache
def _compiled_attention() -> Callable[..., Any]:
    """Only the compiled form is fused; inside a compiled block it is traced along."""
    return torch.compile(flex_attention)


@functools.cache
def _compiled_create() -> Callable[..., Any]:
    """Compiled, the mask is reduced to blocks without an S² tensor in between."""
    return torch.compile(create_block_mask)
