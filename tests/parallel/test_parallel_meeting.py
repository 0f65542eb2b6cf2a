"""Where the ranks meet, and who may listen in."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

import pytest

from armillary.foundation.errors import RunError
from armillary.parallel import meeting

LISTENING = "0A"  # TCP_LISTEN of linux/tcp_states.h


def listeners(port: int) -> list[str]:
    """Addresses on which something listens at this port, as /proc writes them."""
    found = []
    for name in ("tcp", "tcp6"):
        with Path(f"/proc/net/{name}").open() as table:
            for line in list(table)[1:]:
                address, state = line.split()[1], line.split()[3]
                if state == LISTENING and int(address.rpartition(":")[2], 16) == port:
                    found.append(address.rpartition(":")[0])
    return found


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        chosen = int(probe.getsockname()[1])
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(chosen))
    monkeypatch.setenv("WORLD_SIZE", "2")
    return chosen


def test_ranks_of_one_machine_meet_on_its_loopback_only(port: int) -> None:
    served, grouped = meeting.meet(0, 2, timedelta(seconds=10))
    other, _ = meeting.meet(1, 2, timedelta(seconds=10))
    served.set("said", "by rank 0")
    assert (other.get("said"), grouped.get("said")) == (b"by rank 0", b"by rank 0")
    assert listeners(port) == ["0100007F"]  # 127.0.0.1, least significant byte first


def test_a_name_that_leads_to_the_loopback_is_not_where_other_machines_could_come(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = socket.getaddrinfo("127.0.0.1", port, type=socket.SOCK_STREAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert meeting._is_name_of_the_loopback("this-host", "127.0.0.1")
    assert not meeting._is_name_of_the_loopback("localhost", "127.0.0.1")
    with socket.socket(fileno=meeting._listen("this-host", port)):
        assert set("".join(listeners(port))) == {"0"}  # any address


@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_that_is_taken_or_silent_is_told_in_words(rank: int, port: int) -> None:
    with socket.socket() as taken:
        if rank == 0:
            taken.bind(("127.0.0.1", port))
            taken.listen()
        with pytest.raises(RunError, match=f"cannot meet at 127.0.0.1:{port}"):
            meeting.meet(rank, 2, timedelta(seconds=1))
