"""Hosts on one machine: network namespaces at one switch, cables that can be pulled. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType

INTERFACE = "eth0"
"""What a host calls its end of the cable."""
_SWITCH = "switch"
_BRIDGE = "bridge0"


def why_not() -> str:
    """Why there can be no hosts here; empty if there can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces are root's to make"
    if shutil.which("ip") is None:
        return "there is no `ip` command (iproute2)"
    with_name = f"armillary-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", with_name], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", with_name], check=True)
    return ""


class Network:
    """Hosts 10.77.0.1, 10.77.0.2, ... that reach each other and nobody else, while entered."""

    def __init__(self, hosts: int) -> None:
        self._hosts = range(hosts)

    def address(self, host: int) -> str:
        """Where a host is reached."""
        return f"10.77.0.{host + 1}"

    def inside(self, host: int) -> list[str]:
        """What a command is started by to run on a host."""
        return ["ip", "netns", "exec", self._name(str(host))]

    def unplug(self, host: int) -> None:
        """Pulls a host's cable: what it sends and what is sent to it is lost, untold."""
        self._ip(_SWITCH, "link", "set", f"port{host}", "down")

    def plug(self, host: int) -> None:
        """Puts the cable back."""
        self._ip(_SWITCH, "link", "set", f"port{host}", "up")

    def __enter__(self) -> Network:
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def _build(self) -> None:
        for name in (_SWITCH, *map(str, self._hosts)):
            _run(["ip", "netns", "add", self._name(name)])
            self._ip(name, "link", "set", "lo", "up")
        self._ip(_SWITCH, "link", "add", _BRIDGE, "type", "bridge")
        self._ip(_SWITCH, "link", "set", _BRIDGE, "up")
        for host in self._hosts:
            port, name = f"port{host}", str(host)
            cable = ["link", "add", port, "type", "veth", "peer", "name", INTERFACE]
            self._ip(_SWITCH, *cable, "netns", self._name(name))
            self._ip(_SWITCH, "link", "set", port, "master", _BRIDGE)
            self._ip(_SWITCH, "link", "set", port, "up")
            self._ip(name, "address", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            self._ip(name, "link", "set", INTERFACE, "up")

    def _remove(self) -> None:
        for name in (*map(str, self._hosts), _SWITCH):
            subprocess.run(["ip", "netns", "delete", self._name(name)], capture_output=True)

    def _ip(self, name: str, *words: str) -> None:
        _run(["ip", "-netns", self._name(name), *words])

    def _name(self, name: str) -> str:
        return f"armillary-{os.getpid()}-{name}"


def _run(command: Sequence[str]) -> None:
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, f"{' '.join(command)}: {made.stderr}"
