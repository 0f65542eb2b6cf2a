"""The one place that knows torchft: its lighthouse, and the member that each group has of it.

torchft's coordination layer is used, and not its Python manager: the exchanges between groups are
ours (`link.py`), so that no pickle travels and each listens where it was told to.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from armillary.foundation.errors import missing_extra

_HEARTBEAT = timedelta(milliseconds=100)
_CONNECT = timedelta(seconds=10)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quorum:
    """Who takes part, as one rank of a group sees it.

    Its other ranks see the same but for the store, and for who sends its state to whom: torchft has
    ranks of one group heal from different peers.
    """

    number: int
    """Rises when the members change, or one of them asks for new links."""
    rank: int
    """Place of this group among those that are there, from 0."""
    size: int
    """Groups that are there."""
    heals_from: int | None
    """The place of a group that is ahead of this one and sends its state; None: not needed."""
    heals: tuple[int, ...]
    """Places of the groups that this one sends its state to."""
    store: str
    """HOST:PORT of the store where ranks of this number meet."""
    names: tuple[str, ...]
    """Of the groups, in order of place; see `group_name`."""

    def whose_state(self, places: int) -> list[int]:
        """Who sends its state to whom, as so many numbers of which `healed_as` is made."""
        origin = 0 if self.heals_from is None else self.heals_from + 1
        return [origin, *(int(place in self.heals) for place in range(places))]

    def healed_as(self, whose: Sequence[int]) -> Quorum:
        """The same with senders that another rank of the group was told of."""
        origin, *sent = whose
        heals = tuple(place for place, told in enumerate(sent) if told)
        return replace(self, heals_from=origin - 1 if origin else None, heals=heals)


def group_name(group: int, identity: str) -> str:
    """What a group calls itself. Names sort by number; each start of a group has another one.

    Args:
        group: its number.
        identity: of what it trains; equal in all groups that may work together.
    """
    return f"group-{group:06d}:{identity}:{uuid.uuid4()}"


def parts_of(name: str) -> tuple[int, str]:
    """Number and identity in a name."""
    number, identity, _ = name.split(":", 2)
    return int(number.removeprefix("group-")), identity


class Lighthouse:
    """The server that all groups know: it says who is there, and holds no state of the training."""

    def __init__(
        self, bind: str, *, least: int, join_seconds: float, silent_seconds: float
    ) -> None:
        """Listens at once.

        Args:
            bind: HOST:PORT; port 0 takes a free one.
            least: groups without which nothing begins.
            join_seconds: how long those who are ready wait for others that are alive.
            silent_seconds: after which a group without a sign of life is gone.

        Raises:
            UserError: torchft is not installed.
        """
        self._server = _coordination().LighthouseServer(
            bind=bind,
            min_replicas=least,
            join_timeout_ms=round(join_seconds * 1000),
            quorum_tick_ms=20,
            heartbeat_timeout_ms=round(silent_seconds * 1000),
        )
        self.port = int(self._server.address().rpartition(":")[2])

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()


class Member:
    """What one rank needs to ask who is there. Rank 0 of a group holds the group's server.

    Args:
        name: of the group, from rank 0; the others' is not looked at.
        lighthouse: HOST:PORT.
        host: address of this machine for other groups; what listens, listens there.
        rank: of this process in its group.
        size: ranks of the group.
        from_main: gives every rank what rank 0 made of it; called by all ranks together.

    Raises:
        what `from_main` makes of a RuntimeError: there is no lighthouse.
    """

    def __init__(
        self,
        name: str,
        *,
        lighthouse: str,
        host: str,
        rank: int,
        size: int,
        from_main: Callable[[Callable[[], str]], str],
    ) -> None:
        coordination = _coordination()
        self._rank = rank
        self._server: Any = None
        self._store: Any = None

        def serve() -> str:
            self._store, store = _listen(host)
            self._server = coordination.ManagerServer(
                replica_id=name,
                lighthouse_addr=f"http://{lighthouse}",
                hostname=host,
                bind=f"{_bracketed(host)}:0",
                store_addr=store,
                world_size=size,
                heartbeat_interval=_HEARTBEAT,
                connect_timeout=_CONNECT,
                quorum_retries=0,
            )
            return str(self._server.address())

        self._address = from_main(serve)
        self._client: Any = None

    def meet(self, progress: int, *, failures: int, seconds: float) -> Quorum:
        """Waits for the groups that are there; every rank of the group calls it.

        Args:
            progress: how far this group has come; those behind get the state of one that is not.
            failures: above 0: the links of last time are broken.
            seconds: to wait.

        Raises:
            TimeoutError, RuntimeError: no quorum in that time, or no lighthouse.
        """
        if self._client is None:  # here, as one rank may have to try again by itself
            client = _coordination().ManagerClient
            self._client = client(self._address, connect_timeout=_CONNECT)
        found = self._client._quorum(
            group_rank=self._rank,
            step=progress,
            checkpoint_metadata="",
            shrink_only=False,
            timeout=timedelta(seconds=seconds),
            commit_failures=failures,
            init_sync=False,  # all start from the same weights, on every mesh
        )
        return Quorum(
            number=found.quorum_id,
            rank=found.replica_rank,
            size=found.replica_world_size,
            heals_from=found.recover_src_replica_rank if found.heal else None,
            heals=tuple(found.recover_dst_replica_ranks),
            store=found.store_address,
            names=tuple(found.replica_ids),
        )

    def close(self) -> None:
        """Leaves: the lighthouse counts this group as gone after its silent time."""
        if self._server is not None:
            self._server.shutdown()
        self._server = self._store = None


def _coordination() -> Any:
    # Its servers log every request on standard error, unless told otherwise before it is loaded.
    os.environ.setdefault("RUST_LOG", "error")
    try:
        from torchft import coordination
    except ImportError as error:
        raise missing_extra("torchft", "replicas.lighthouse") from error
    return coordination


def _listen(host: str) -> tuple[Any, str]:
    """A store that listens at one address only, and HOST:PORT of it."""
    import torch.distributed as dist

    torch: Any = dist  # whose stubs do not export its stores
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = int(listener.getsockname()[1])
    store = torch.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, f"{_bracketed(host)}:{port}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
