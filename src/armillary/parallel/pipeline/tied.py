"""One weight on two stages: a head that is tied to the embedding, at the other end of a pipeline.

Each end holds a copy of the weight, or of its shard. The copies start with the same values, and
each gets the sum of the gradients of both, so that they stay equal bit for bit. Where both are on
one rank (V-shaped schedules), there is one weight to the outside, the first stage's, and the last
one follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from armillary.parallel.layout import local_tensor
from armillary.parallel.mesh import Mesh
from armillary.parallel.pipeline.stage import Stage, stage_of

_FIRST, _LAST = "embedding.weight", "head.weight"
"""Names of the copies in the first and in the last stage."""


def tied_gradient_hook(parts: Sequence[nn.Module], mesh: Mesh) -> Callable[[], None] | None:
    """What sums the gradients of a tied weight over its two ends, after the backward pass and all
    reductions over data; None where this rank holds no end of one, or it is not trained.
    """
    ends = _ends(parts, mesh)
    if not ends or not ends[0][1].requires_grad:
        return None
    if len(ends) == 2:
        first, last = (weight for _, weight in ends)
        return lambda: _add_local(first, last)
    stage, weight = ends[0]
    other = stage.ranks[-1] if stage.is_first else stage.ranks[0]
    group = mesh.group("pp")
    assert group is not None, "stages on two ranks have a process group"
    return lambda: _add_remote(weight, other, group, mesh.device)


def counted_elsewhere(parts: Sequence[nn.Module], mesh: Mesh) -> set[str]:
    """Canonical names of parameters here that the rank of the first stage counts in norms."""
    ends = _ends(parts, mesh)
    return {_FIRST} if len(ends) == 1 and ends[0][0].is_last else set()


@torch.no_grad()
def follow_first(parts: Sequence[nn.Module], mesh: Mesh) -> None:
    """Where both ends are on this rank, gives the last one the values of the first.

    To be called before weights are used: whoever changes the first need not know of the last.
    """
    ends = _ends(parts, mesh)
    if len(ends) == 2:
        first, last = (local_tensor(weight) for _, weight in ends)
        last.copy_(first)


def _ends(parts: Sequence[nn.Module], mesh: Mesh) -> list[tuple[Stage, nn.Parameter]]:
    """Stages of this rank that hold a copy of a tied weight, with it; the first stage first."""
    if mesh.degree("pp") == 1:
        return []
    found = [(stage_of(part), part) for part in parts]
    return [
        (stage, part.get_parameter(_FIRST if stage.is_first else _LAST))
        for stage, part in found
        if stage.tied and (stage.is_first or stage.is_last)
    ]


def _add_local(first: nn.Parameter, last: nn.Parameter) -> None:
    _gradient(first).add_(_gradient(last))
    last.grad = None


def _add_remote(
    weight: nn.Parameter, other: int, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Adds the gradient of the other end, which does the same: a + b is b + a to the last bit."""
    own = _gradient(weight)
    if own.numel() == 0:
        return
    sent = own.to(device).contiguous()  # gradients may be kept on the host
    received = torch.empty_like(sent)
    work = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, group=group, group_peer=other),
            dist.P2POp(dist.irecv, received, group=group, group_peer=other),
        ]
    )
    for transfer in work:
        transfer.wait()
    own.add_(received.to(own.device))


def _gradient(weight: nn.Parameter) -> Tensor:
    """What this rank holds of the gradient of one end."""
    assert weight.grad is not None, "both ends take part in every step"
    return local_tensor(weight.grad)
