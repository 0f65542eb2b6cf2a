"""Who may publish in a place that no lock of an operating system guards. Imports no torch.

`claim.json` names the newest run that writes there. It is looked at right before each manifest is
put: a run that was thought dead, and is not, finds another name in it and stops. Between the look
and the put there is a moment; what could slip through it is a checkpoint whose files the newer run
has cleared away, which does not verify and is therefore never resumed from.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Callable
from datetime import UTC, datetime

from armillary.foundation.errors import Problem, RunError
from armillary.foundation.strict_json import parse_json

CLAIM = "claim.json"


class Fence:
    """This process's claim on a place.

    Args:
        address: of the place, for people.
        read: gives the bytes of a file there; raises `FileNotFoundError`.
        write: replaces a file there in one request.
    """

    def __init__(
        self, address: str, read: Callable[[str], bytes], write: Callable[[str, bytes], None]
    ) -> None:
        self._address, self._read, self._write = address, read, write
        self._own = uuid.uuid4().hex
        self._taken = False

    def take(self) -> None:
        """From now on this process is the only one that publishes."""
        since = datetime.now(UTC).isoformat(timespec="seconds")
        claim = {
            "owner": self._own,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "since": since,
        }
        self._write(CLAIM, json.dumps(claim).encode())
        self._taken = True

    def require(self) -> None:
        """Passes only the newest owner; who has not claimed the place yet does so.

        Raises:
            RunError: another run has claimed it since.
        """
        if not self._taken:
            self.take()
            return
        try:
            claim = parse_json(self._read(CLAIM))
        except FileNotFoundError:
            self.take()
            return
        except ValueError as error:
            claim = {"host": f"unknown: {CLAIM} is unreadable ({error})"}
        if not isinstance(claim, dict) or claim.get("owner") != self._own:
            other = claim if isinstance(claim, dict) else {}
            raise RunError(
                Problem(
                    f"another run writes to {self._address}: process {other.get('process')} on"
                    f" host {other.get('host')}, since {other.get('since')}",
                    "one run at a time",
                    "end one of the two, or give this one another --checkpoint.folder",
                )
            )
