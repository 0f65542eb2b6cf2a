"""Where ranks meet under torchrun: the store of its agent, with a corner for each start of ranks.

An agent makes one store and keeps it while it starts ranks again and again, with as many as are
there at the time. What earlier ranks left in it, addresses, verdicts about the lost, requests to
stop, would be taken for news. No variable that torchrun sets tells one start from the next on all
hosts alike (`TORCHELASTIC_RESTART_COUNT` is each agent's own), so rank 0 makes up a name and hands
it to the ranks that are there now: each shows a ticket nobody has had before, and takes the name
that is left under it.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist

from armillary.foundation.errors import Problem, RunError

Store: TypeAlias = Any
"""A torch.distributed.Store, which torch's stubs do not export."""

_TICKET_OF = "armillary/ticket-of/"
_NAME_FOR = "armillary/name-for/"
_POLL_SECONDS = 0.05


def is_shared() -> bool:
    """Whether an agent of torchrun serves a store that outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def meet(rank: int, world_size: int, timeout: timedelta) -> tuple[Store, Store]:
    """Two connections of this rank to the part of the agent's store that is of this start only.

    Raises:
        RunError: the ranks were not all there within the timeout.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

    def connect() -> Store:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=False, timeout=timeout, wait_for_workers=False
        )

    try:
        ours, other = connect(), connect()
        name = _named(ours, world_size, timeout) if rank == 0 else _told(ours, rank, timeout)
    except (dist.DistError, TimeoutError) as error:
        raise RunError(
            Problem(
                f"rank {rank} did not meet the other {world_size - 1} at {host}:{port} within"
                f" {timeout.total_seconds():.0f} s: {str(error).splitlines()[0]}",
                fix="if the hosts of the run have changed, start each torchrun with"
                " TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment",
            )
        ) from error
    ours, other = (
        dist.PrefixStore(name, each)  # type: ignore[attr-defined]
        for each in (ours, other)
    )
    return ours, other


def _named(store: Store, world_size: int, timeout: timedelta) -> str:
    """Rank 0: a new name, once all others have taken it."""
    name = f"armillary/start/{uuid.uuid4().hex}"
    answered: set[bytes] = set()
    until = time.monotonic() + timeout.total_seconds()
    while (there := store.add(name, 0)) < world_size - 1:
        for rank in range(1, world_size):
            if not store.check([f"{_TICKET_OF}{rank}"]):
                continue
            ticket = store.get(f"{_TICKET_OF}{rank}")
            if ticket not in answered:  # one of an earlier start is answered too, and not missed
                answered.add(ticket)
                store.set(_NAME_FOR + ticket.decode(), name)
        if time.monotonic() > until:
            raise TimeoutError(f"{there} came")
        time.sleep(_POLL_SECONDS)
    return name


def _told(store: Store, rank: int, timeout: timedelta) -> str:
    """Any other rank: the name of the start that it is part of."""
    ticket = uuid.uuid4().hex
    store.set(f"{_TICKET_OF}{rank}", ticket)
    store.wait([_NAME_FOR + ticket], timeout)
    name: str = store.get(_NAME_FOR + ticket).decode()
    store.add(name, 1)
    return name
