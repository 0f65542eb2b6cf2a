"""The state of a group, sent to one that is behind: a line of JSON, then raw tensors. No pickle.

Each rank sends what it holds to the rank of its own number, so groups have the same mesh, and
nothing is gathered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from armillary.parallel.replicas.link import Link, LinkBroken

_MOST_BYTES_OF_TEXT = 1 << 28


def send_state(link: Link, to: int, facts: dict[str, Any], state: Mapping[str, Tensor]) -> None:
    """Sends facts and tensors to one group.

    Args:
        link: to the groups.
        to: the place of the one that is behind.
        facts: JSON-able.
        state: what this rank holds, by name.

    Raises:
        LinkBroken: it is gone.
    """
    table = {name: _kind(tensor) for name, tensor in state.items()}
    text = json.dumps({"facts": facts, "tensors": table}).encode()
    link.send(torch.tensor([len(text)], dtype=torch.int64), to)
    link.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), to)
    for tensor in state.values():
        link.send(tensor, to)


@dataclass(frozen=True, slots=True)
class Announced:
    """What a group that is ahead is about to send."""

    facts: dict[str, Any]
    tensors: dict[str, list[Any]]
    """By name, dtype and shape."""


def receive_facts(link: Link, origin: int) -> Announced:
    """The first part of a state; `receive_tensors` is the second.

    Raises:
        LinkBroken: the sender is gone.
    """
    length = torch.zeros(1, dtype=torch.int64)
    link.receive_(length, origin)
    if not 0 < int(length) <= _MOST_BYTES_OF_TEXT:
        raise LinkBroken(f"a peer announced {int(length)} bytes of text")
    text = torch.empty(int(length), dtype=torch.uint8)
    link.receive_(text, origin)
    read = json.loads(text.numpy().tobytes())
    return Announced(read["facts"], read["tensors"])


def receive_tensors(
    link: Link, origin: int, announced: Announced, state: Mapping[str, Tensor]
) -> None:
    """Fills this rank's tensors.

    Raises:
        LinkBroken: the sender is gone, or holds other tensors; these then hold anything.
    """
    own = {name: _kind(tensor) for name, tensor in state.items()}
    if own != announced.tensors:
        every = sorted(own | announced.tensors)
        names = [name for name in every if own.get(name) != announced.tensors.get(name)]
        raise LinkBroken(f"a peer holds other tensors: {', '.join(names[:5])}")
    for name in announced.tensors:
        link.receive_(state[name], origin)


def _kind(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype), list(tensor.shape)]
