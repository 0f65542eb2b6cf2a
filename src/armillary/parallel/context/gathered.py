"""Every rank gathers all keys and values and attends with its own queries. (all-gather)

With few kv heads, keys and values are small next to what is computed with them, and any mask goes.
(Llama 3, arXiv 2407.21783, section 3.3.2)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from armillary.kernels import attention_with_sinks, partial_attention
from armillary.models.layers.attention_core import AttentionCore
from armillary.models.layers.backends import BACKENDS
from armillary.parallel.collectives import all_gather
from armillary.parallel.context.balance import chunks_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class GatheredSight(NamedTuple):
    """What this rank's queries see of whole rows."""

    starts: Tensor
    """`[B, S / R]`, the first index that each query sees."""
    query_index: Tensor
    """`[S / R]`, index in the row of each query."""
    key_index: Tensor
    """`[S]`, 0 to S - 1."""
    mask: BlockMask | None
    """The same for FlexAttention, where that is used."""
    ranks: int
    """R."""
    head_tail: bool
    """Whether a rank holds two chunks of a row."""
    group: str
    """Name of the group of ranks."""


def attend(
    core: AttentionCore, query: Tensor, key: Tensor, value: Tensor, sight: GatheredSight
) -> Tensor:
    """Query `[B, H, S / R, P]`, key and value `[B, K, S / R, P]` -> `[B, H, S / R, Pv]`."""
    widths = [key.shape[-1], value.shape[-1]]
    gathered = all_gather(torch.cat((key, value), dim=-1), 0, sight.group)  # one message
    key, value = torch.split(_in_row_order(gathered, sight), widths, dim=-1)  # [B, K, S, P]
    if sight.mask is not None:
        flex = BACKENDS["flex"]
        return flex.attend(query, key, value, sight.mask, scale=core.scale, sinks=core.sinks)
    places = (sight.query_index, sight.key_index)
    out, lse = partial_attention(query, key, value, *places, starts=sight.starts, scale=core.scale)
    return out if core.sinks is None else attention_with_sinks(out, lse, core.sinks)


def block_mask(starts: Tensor, query_index: Tensor, length: int) -> BlockMask:
    """For FlexAttention: queries at `query_index` see `starts` `[B, S / R]` to their own place."""

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query_index[query]) & (key >= starts[row, query])

    create = _compiled_create() if starts.is_cuda else create_block_mask
    batch, queries = starts.shape
    mask: BlockMask = create(visible, batch, None, queries, length, device=starts.device)
    return mask


@functools.cache
def _compiled_create() -> Callable[..., Any]:
    """Compiled, the mask is reduced to blocks without a tensor of all pairs in between."""
    return torch.compile(create_block_mask)


def _in_row_order(gathered: Tensor, sight: GatheredSight) -> Tensor:
    """`[R x B, K, S / R, P]`, by rank -> `[B, K, S, P]`, by index in the row."""
    by_rank = torch.unflatten(gathered, 0, (sight.ranks, -1))  # [R, B, K, S / R, P]
    places = [
        chunks_of(rank, sight.ranks, head_tail=sight.head_tail) for rank in range(sight.ranks)
    ]
    parts = by_rank.chunk(len(places[0]), dim=3)  # a rank's first chunk, and its second if it has
    chunks = {
        place: part[rank]
        for rank, held in enumerate(places)
        for place, part in zip(held, parts, strict=True)
    }
    return torch.cat([chunks[place] for place in sorted(chunks)], dim=2)
