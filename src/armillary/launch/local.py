"""Starts the ranks of a run on this machine and waits for them. Loads no torch.

torchrun would do too, but it turns every exit code of a rank into 1, and a run that stopped on
request with its state saved (75) is no failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from armillary.foundation.errors import EXIT_INTERRUPTED, EXIT_RUN_ME_AGAIN, Problem, UserError
from armillary.foundation.tell import WORDS_VARIABLE
from armillary.launch.forwarding import Forwarding
from armillary.launch.place import Place
from armillary.resilience.signals import STOP_SIGNALS

_POLL_SECONDS = 0.02
_SETTLE_SECONDS = 0.3
_KEPT_LINES = 200
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h

PROGRAM = (sys.executable, "-m", "armillary")
"""What a rank runs."""
_HEARS_EARLIER_SIGNALS = "train"
"""The command whose ranks listen to signals, from some time after their start on."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How the ranks of one launch ended, all of them."""

    exit_code: int
    """Of the whole; see `launch`."""
    reason: str = ""
    """Of a failure, in one line: which rank failed first, how, and its first words."""
    asked: bool = False
    """Whether a signal was passed on to the ranks, so that somebody wants them to end."""


def launch(
    argv: Sequence[str],
    nproc: int,
    *,
    place: Place | None = None,
    program: Sequence[str] = PROGRAM,
    grace_seconds: float = 30.0,
) -> int:
    """Runs `program argv` as `nproc` ranks and returns the exit code of the whole.

    Returns:
        The code of the rank that failed first, 128 + N for one that died of signal N; without a
        failure 75 if any rank asks to be run again, else 0.

    Raises:
        UserError: fewer than one rank.
    """
    with Forwarding() as signals:
        ended = run_once(
            argv,
            nproc,
            signals=signals,
            place=place,
            program=program,
            grace_seconds=grace_seconds,
        )
    return ended.exit_code


def run_once(
    argv: Sequence[str],
    nproc: int,
    *,
    signals: Forwarding,
    place: Place | None = None,
    program: Sequence[str] = PROGRAM,
    grace_seconds: float = 30.0,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Starts the ranks, waits for all of them, and says how they ended; see `launch`.

    Rank 0 speaks through this process' output. When a rank fails, the reason is told once, however
    many ranks share it and whatever follows from it on others: in the rank's own words
    (`foundation.tell`), else with the end of its standard error. The others are then asked to end,
    and killed after the grace. Signals are passed on to every rank, once each time they come.
    Without a place, all ranks of the run are here.

    Args:
        signals: entered.
        environment: variables for every rank, beside those that tell it its place.

    Raises:
        UserError: fewer than one rank.
    """
    if nproc < 1:
        raise UserError(Problem(f"--nproc {nproc} is not a number of ranks", "1 or more"))
    ranks: list[_Rank] = []
    place = (place or Place()).settled()
    with tempfile.TemporaryDirectory(prefix="armillary-ranks-") as folder:
        try:
            for rank in range(nproc):
                words = Path(folder, str(rank))
                known = place.environment(rank, nproc) | dict(environment or {})
                ranks.append(_Rank([*program, *argv], rank, known, words))
            for each in ranks:
                each.listen()
            with signals.to(ranks):
                first_failed = _wait(ranks, grace_seconds)
            if first_failed is None and ranks[0].words():
                print(ranks[0].words(), file=sys.stderr)  # it was stopped before it had a console
            reason = first_failed.reason() if first_failed is not None else ""
        finally:
            for each in ranks:
                each.kill()
    if first_failed is not None:
        return Ended(first_failed.exit_code, reason, signals.came)
    return Ended(max((each.exit_code for each in ranks), default=0), asked=signals.came)


class _Rank:
    """One process, in a session of its own so that a terminal's Ctrl-C reaches it only once."""

    def __init__(
        self, command: list[str], rank: int, environment: dict[str, str], words: Path
    ) -> None:
        self.rank = rank  # on this machine
        self.number = environment["RANK"]
        self.asked_to_end = False
        self._words = words
        self._ended_at: float | None = None
        listens = command[: len(PROGRAM) + 1] == [*PROGRAM, _HEARS_EARLIER_SIGNALS]
        self.process = subprocess.Popen(
            command,
            env=os.environ | environment | {WORDS_VARIABLE: str(words)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if rank else None,
            stderr=subprocess.PIPE if rank else None,
            start_new_session=True,
            preexec_fn=_begin(listens=listens),  # noqa: PLW1509  # no thread runs before listen()
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

    @property
    def stopped(self) -> bool:
        """Whether it has ended because it was asked to."""
        return self.process.poll() == EXIT_RUN_ME_AGAIN

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

    def reason(self) -> str:
        """Its failure in one line."""
        text = (self.words() or self.last_lines()).strip()
        line = text.splitlines()[0].removeprefix("error: ") if text else ""
        return f"rank {self.number} {self.how_it_ended()}" + (line and f": {line}")

    def how_it_ended(self) -> str:
        """The manner of its failure."""
        code = self.process.returncode
        return f"died of {_name_of(-code)}" if code < 0 else f"failed with exit code {code}"

    def last_lines(self) -> str:
        """The end of its standard error; empty for rank 0, whose is the launcher's."""
        if self._listener is not None:
            self._listener.join(timeout=1.0)
        return b"".join(self._lines).decode(errors="replace").rstrip()


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return f"signal {number}"


def _wait(ranks: list[_Rank], grace_seconds: float) -> _Rank | None:
    """Waits for all ranks to end; tells why the first that failed did, and returns it."""
    first: _Rank | None = None
    settled = deadline = left = float("inf")
    asked = False
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
        if left == float("inf") and any(each.stopped for each in ranks):
            left = now + grace_seconds
        if now > left and not asked:  # it was asked by itself, and left before it met the others
            asked = True
            for each in ranks:
                each.send(signal.SIGTERM)
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
        print(f"error: rank {first.number} {first.how_it_ended()}", file=sys.stderr)
    text = words or first.last_lines()
    if text:
        print(text, file=sys.stderr)
    return first


def _begin(*, listens: bool) -> Callable[[], None]:
    """What a rank calls first: on Linux, ask for SIGTERM should the launcher be killed.

    One that will listen to signals hears of earlier ones when it does (`resilience.signals`);
    without that, a rank that has only just been started would die of them.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None  # looked up before the fork
    launcher = os.getpid()

    def begin() -> None:
        if listens:
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        if library is not None:
            library.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
            if os.getppid() != launcher:  # killed before we asked
                os.kill(os.getpid(), signal.SIGTERM)

    return begin


def _keep(pipe: IO[bytes], lines: deque[bytes]) -> None:
    with pipe:
        lines.extend(pipe)
