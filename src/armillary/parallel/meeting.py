"""Where the ranks meet: a store of torch that listens at one address, not at all of the machine's.

torch's own rendezvous binds every interface, with no password. Ranks that Armillary or a batch
system started meet at MASTER_ADDR and nowhere else: the loopback, when all of them are here. (Where
a machine's own name leads to its loopback, and the run has other machines, there is no address to
choose, and it listens at all.) Under torchrun its agent has made the store.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from armillary.foundation.errors import Problem, RunError

_torch: Any = dist  # its stubs do not export the stores
_MOST_WAITING = 4_096
"""Ranks that may connect before the store has answered one of them; the system may allow fewer."""


def is_ours() -> bool:
    """Whether no agent of torchrun has made a meeting point already."""
    return "TORCHELASTIC_USE_AGENT_STORE" not in os.environ


def meet(rank: int, world_size: int, timeout: timedelta) -> tuple[Any, Any]:
    """Two connections of this rank to the store at MASTER_ADDR:MASTER_PORT, which rank 0 serves.

    The first serves as long as it is there, on rank 0. The second is for the process group, which
    may keep it busy, waiting.

    Raises:
        RunError: rank 0 cannot listen there, or nobody did within the timeout.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

    def connect(listening: int | None = None) -> Any:
        return _torch.TCPStore(
            host,
            port,
            world_size,
            is_master=listening is not None,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listening,
        )

    try:
        return connect(_listen(host, port) if rank == 0 else None), connect()
    except (OSError, dist.DistError) as error:
        raise RunError(
            Problem(
                f"the ranks cannot meet at {host}:{port}: {str(error).splitlines()[0]}",
                allowed="an address of the machine of rank 0, and a port that is free there",
                fix="another --meet HOST:PORT, or MASTER_ADDR and MASTER_PORT",
            )
        ) from error


def _listen(host: str, port: int) -> int:
    """A socket that listens at this address only; its descriptor belongs to the caller."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if _is_name_of_the_loopback(host, str(address[0])) and _spans_machines():
        # Many systems call themselves 127.0.1.1, where no other machine could find them.
        both = socket.has_dualstack_ipv6()
        family, address = socket.AF_INET6 if both else socket.AF_INET, ("", port)
        listener = socket.create_server(
            address, family=family, backlog=_MOST_WAITING, dualstack_ipv6=both
        )
    else:
        listener = socket.create_server(address[:2], family=family, backlog=_MOST_WAITING)
    return listener.detach()


def _spans_machines() -> bool:
    world_size = os.environ.get("WORLD_SIZE", "1")
    return os.environ.get("LOCAL_WORLD_SIZE", world_size) != world_size


def _is_name_of_the_loopback(host: str, address: str) -> bool:
    """Whether a name, not an address, leads to this machine alone."""
    return ipaddress.ip_address(address).is_loopback and host not in (address, "localhost")
