"""Starts the ranks of a run on this machine and waits for them. Loads no torch.

torchrun would do too, but it turns every exit code of a rank into 1, and a run that stopped on
request with its state saved (75) is no failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from armillary.foundation.errors import EXIT_INTERRUPTED, EXIT_RUN_ME_AGAIN, Problem, UserError
from armillary.foundation.tell import WORDS_VARIABLE

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_POLL_SECONDS = 0.02
_SETTLE_SECONDS = 0.3
_KEPT_LINES = 200
_TRIES_BEFORE_KILL = 3
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h


def launch(
    argv: Sequence[str],
    nproc: int,
    *,
    program: Sequence[str] = (sys.executable, "-m", "armillary"),
    grace_seconds: float = 30.0,
) -> int:
    """Runs `program argv` as `nproc` ranks and returns the exit code of the whole.

    Rank 0 speaks through this process' output. When a rank fails, the reason is told once, however
    many ranks share it and whatever follows from it on others: in the rank's own words
    (`foundation.tell`), else with the end of its standard error. The others are then asked to end,
    and killed after the grace. SIGINT, SIGTERM and SIGUSR1 are passed on to every rank once each
    time they come; the third request to stop kills.

    Returns:
        The code of the rank that failed first, 128 + N for one that died of signal N; without a
        failure 75 if any rank asks to be run again, else 0.

    Raises:
        UserError: fewer than one rank.
    """
    if nproc < 1:
        raise UserError(Problem(f"--nproc {nproc} is not a number of ranks", "1 or more"))
    ranks: list[_Rank] = []
    port = _free_port()
    with (
        tempfile.TemporaryDirectory(prefix="armillary-ranks-") as folder,
        _forwarding(ranks) as pass_on,
    ):
        try:
            for rank in range(nproc):
                words = Path(folder, str(rank))
                ranks.append(_Rank([*program, *argv], rank, nproc, port, words))
            for each in ranks:
                each.listen()
            pass_on()
            first_failed = _wait(ranks, grace_seconds)
            if first_failed is None and ranks[0].words():
                print(ranks[0].words(), file=sys.stderr)  # it was stopped before it had a console
        finally:
            for each in ranks:
                each.kill()
    if first_failed is not None:
        return first_failed.exit_code
    return max((each.exit_code for each in ranks), default=0)


class _Rank:
    """One process, in a session of its own so that a terminal's Ctrl-C reaches it only once."""

    def __init__(self, command: list[str], rank: int, nproc: int, port: int, words: Path) -> None:
        self.rank = rank
        self.asked_to_end = False
        self._words = words
        self._ended_at: float | None = None
        self.process = subprocess.Popen(
            command,
            env=os.environ | _environment(rank, nproc, port) | {WORDS_VARIABLE: str(words)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if rank else None,
            stderr=subprocess.PIPE if rank else None,
            start_new_session=True,
            preexec_fn=_end_with_parent(),  # noqa: PLW1509  # no thread runs before listen()
        )
        self._lines: deque[bytes] = deque(maxlen=_KEPT_LINES)
        self._listener: threading.Thread | None = None

    def listen(self) -> None:
        """Starts to read what the rank says, so that its pipe never fills."""
        if self.process.stderr is not None:
            self._listener = threading.Thread(
                target=_keep, args=(self.process.stderr, self._lines), daemon=True
            )
            self._listener.start()

    @property
    def exit_code(self) -> int:
        """The exit code, 128 + N after signal N."""
        code = self.process.returncode
        return 128 - code if code < 0 else code

    @property
    def failed(self) -> bool:
        """Whether it ended by itself, and neither finished nor saved its state on request."""
        code = self.process.poll()
        if code is not None and self._ended_at is None:
            self._ended_at = time.time()
        return code is not None and code not in (0, EXIT_RUN_ME_AGAIN) and not self.asked_to_end

    def send(self, number: int) -> None:
        """Passes on a signal, unless the process has ended."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def end(self) -> None:
        """Asks the process to end because another rank failed."""
        if self.process.poll() is None:
            self.asked_to_end = True
            self.process.terminate()

    def kill(self) -> None:
        """Ends the process and what it started, at once."""
        if self.process.poll() is None:
            self.asked_to_end = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def failed_at(self) -> float:
        """When it said why it fails, else when its end was noticed; only for one that failed."""
        assert self._ended_at is not None
        return self._words.stat().st_mtime if self._words.exists() else self._ended_at

    def words(self) -> str:
        """Why it ended, as it told the launcher itself; empty if it did not."""
        if not self._words.exists():
            return ""
        return self._words.read_text(encoding="utf-8", errors="replace").rstrip()

    def how_it_ended(self) -> str:
        """The manner of its failure."""
        code = self.process.returncode
        return (
            f"died of {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
        )

    def last_lines(self) -> str:
        """The end of its standard error; empty for rank 0, whose is the launcher's."""
        if self._listener is not None:
            self._listener.join(timeout=1.0)
        return b"".join(self._lines).decode(errors="replace").rstrip()


def _wait(ranks: list[_Rank], grace_seconds: float) -> _Rank | None:
    """Waits for all ranks to end; tells why the first that failed did, and returns it."""
    first: _Rank | None = None
    settled = deadline = float("inf")
    while any(each.process.poll() is None for each in ranks):
        now = time.monotonic()
        if settled == float("inf") and any(each.failed for each in ranks):
            settled = now + _SETTLE_SECONDS  # what all ranks see, they may all say
        if first is None and now > settled:
            first = _first_failed(ranks)
            deadline = now + grace_seconds
            for each in ranks:
                each.end()
        if now > deadline:
            for each in ranks:
                each.kill()
        time.sleep(_POLL_SECONDS)
    return first or _first_failed(ranks)


def _first_failed(ranks: list[_Rank]) -> _Rank | None:
    """The rank that failed first, if any has; tells why."""
    failed = sorted((each for each in ranks if each.failed), key=lambda each: each.failed_at)
    if not failed:
        return None
    first = failed[0]
    words = first.words()
    if not words and first.exit_code == EXIT_INTERRUPTED:
        return first  # people know: they pressed the keys
    if not words or all(each.words() != words for each in failed if each.rank == 0):
        print(f"error: rank {first.rank} {first.how_it_ended()}", file=sys.stderr)
    text = words or first.last_lines()
    if text:
        print(text, file=sys.stderr)
    return first


@contextlib.contextmanager
def _forwarding(ranks: list[_Rank]) -> Iterator[Callable[[], None]]:
    """Passes signals on to the ranks: from the first call of the yielded function on, as they come,
    and with that call those that came before, when not all ranks were there."""
    early: list[int] | None = []
    requests_to_stop = 0

    def forward(number: int, frame: FrameType | None = None) -> None:
        nonlocal requests_to_stop
        if early is not None:
            early.append(number)
            return
        requests_to_stop += number != signal.SIGUSR1
        for each in ranks:
            each.send(number if requests_to_stop < _TRIES_BEFORE_KILL else signal.SIGKILL)

    def pass_on() -> None:
        nonlocal early
        waiting, early = early or [], None
        for number in waiting:
            forward(number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield pass_on
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    """What a rank needs to find the others, and its share of the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (cores or 1) // nproc))),
    }
    if sys.platform == "linux":
        # All ranks are here: no need to depend on how this machine's name resolves.
        environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return environment


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _end_with_parent() -> Callable[[], None] | None:
    """What a rank calls first: on Linux, ask for SIGTERM should the launcher be killed."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)  # looked up before the fork
    return lambda: library.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _keep(pipe: IO[bytes], lines: deque[bytes]) -> None:
    with pipe:
        lines.extend(pipe)
