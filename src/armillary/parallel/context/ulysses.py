"""Heads for tokens: between two exchanges each rank has whole rows of its share of the heads.

(DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv 2309.14509) Kv heads that do not divide by the ranks
are repeated as often as it takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.models.layers.attention_core import AttentionCore
from armillary.models.layers.backends import Visible
from armillary.parallel.collectives import all_to_all


class UlyssesSight(NamedTuple):
    """What the queries of whole rows see."""

    whole: Visible
    """In the form that the core's backend reads."""
    rank: int
    """This rank, and with it its share of the heads."""
    ranks: int
    """R."""
    group: str
    """Name of the group of ranks."""


def attend(
    core: AttentionCore, query: Tensor, key: Tensor, value: Tensor, sight: UlyssesSight
) -> Tensor:
    """Query `[B, H, S / R, P]`, key and value `[B, K, S / R, P]` -> `[B, H, S / R, Pv]`."""
    heads, kv_heads = query.shape[1], key.shape[1]
    assert heads % sight.ranks == 0, f"{sight.ranks} ranks cannot share {heads} heads"
    repeats = sight.ranks // math.gcd(sight.ranks, kv_heads)
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    query, key, value = _whole_rows((query, key, value), sight)
    share = heads // sight.ranks
    own = slice(sight.rank * share, (sight.rank + 1) * share)
    out = core.attend(query, key, value, sight.whole, own)
    return _all_heads(out, sight)


def _whole_rows(tensors: Sequence[Tensor], sight: UlyssesSight) -> list[Tensor]:
    """Each `[B, heads, S / R, P]` -> `[B, heads / R, S, P]`, all in one message."""
    parts = [
        torch.unflatten(x, 1, (sight.ranks, -1)).transpose(0, 1) for x in tensors
    ]  # [R, B, h, ...]
    sent = torch.cat([part.flatten(1) for part in parts], dim=1)  # [R, all that a rank gets]
    sizes = [part[0].numel() for part in parts]
    received = torch.split(all_to_all(sent, sight.group), sizes, dim=1)
    return [
        chunks.view(part.shape).movedim(0, 2).flatten(2, 3)  # ranks hold chunks of the row
        for chunks, part in zip(received, parts, strict=True)
    ]


def _all_heads(out: Tensor, sight: UlyssesSight) -> Tensor:
    """`[B, H / R, S, Pv]` -> `[B, H, S / R, Pv]`."""
    parts = torch.unflatten(out, 2, (sight.ranks, -1)).movedim(2, 0)  # [R, B, h, S / R, Pv]
    return all_to_all(parts, sight.group).transpose(0, 1).flatten(1, 2)
