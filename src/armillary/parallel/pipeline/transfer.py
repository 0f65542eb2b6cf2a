"""Tensors of any shape between the ranks of a pipeline, one at a time: for passes without a plan.

The shape goes first, so that no rank has to know how the others cut a sequence.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

_FORMATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
_MOST_DIMS = 6


def send(tensor: Tensor, to: int, group: dist.ProcessGroup) -> None:
    """Sends a tensor to a rank of the group, which calls `receive`."""
    dist.send(_header(tensor), group=group, group_dst=to)
    dist.send(tensor.contiguous(), group=group, group_dst=to)


def receive(origin: int, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """What a rank of the group sends."""
    header = torch.empty(_MOST_DIMS + 2, dtype=torch.int64, device=device)
    dist.recv(header, group=group, group_src=origin)
    tensor = _like(header)
    dist.recv(tensor, group=group, group_src=origin)
    return tensor


def broadcast(
    tensor: Tensor | None, origin: int, group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    """The tensor that one rank of the group has, on all of them."""
    header = torch.empty(_MOST_DIMS + 2, dtype=torch.int64, device=device)
    if dist.get_rank(group) == origin:
        assert tensor is not None
        header = _header(tensor)
    dist.broadcast(header, group=group, group_src=origin)
    sent = tensor.contiguous() if tensor is not None else _like(header)
    dist.broadcast(sent, group=group, group_src=origin)
    return sent


def _header(tensor: Tensor) -> Tensor:
    assert tensor.dim() <= _MOST_DIMS, f"{tensor.dim()} dims"
    sizes = [*tensor.shape, *[0] * (_MOST_DIMS - tensor.dim())]
    numbers = [_FORMATS.index(tensor.dtype), tensor.dim(), *sizes]
    return torch.tensor(numbers, device=tensor.device)


def _like(header: Tensor) -> Tensor:
    form, dims, *sizes = header.tolist()
    return torch.empty(sizes[:dims], dtype=_FORMATS[form], device=header.device)
