"""Starts the `armillary` command in a fraction of a second: forks of a process that has torch.

    with Zygote() as zygote:
        process = zygote.start(["train", "debug", "--run", str(folder)])
        process.send(signal.SIGTERM)
        assert process.wait(60) == 75
        ranks = zygote.start_ranks(["train", "debug", "--run", str(folder)], 2)
        ranks[1].kill()

The zygote imports torch and armillary once, and starts no thread, process group or store, so that a
fork of it is like a fresh interpreter that has just finished importing. What is forked runs
`armillary`'s `main`, in a session of its own, one thread per process, and ends when the zygote
does, which ends when whoever made it does. Signals that come while torch is being imported cannot
be tried this way.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

_IMPORTS = (
    "torch",
    "torch._dynamo",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "armillary.cli.main",
    "armillary.cli.train_command",
    "armillary.cli.recipe_arguments",
    "armillary.recipes.debug",
    "armillary.training.train",
)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h


class Zygote:
    """Forks commands. Use it as a context; leaving it kills what still runs."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._channel = ours
        self._lock = threading.Lock()
        self._left = b""
        self._answers: list[dict[str, Any]] = []
        self._codes: dict[int, int] = {}
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | _ONE_THREAD | {"CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,  # a Ctrl-C is for whoever made it
            )
        with self._lock:
            self._read_until(lambda: bool(self._answers), timeout=300.0)
            self._answers.clear()

    def __enter__(self) -> Zygote:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the zygote and all that it started."""
        self._channel.close()
        self._server.wait(timeout=30)

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        cwd: Path | str = ".",
        output: Path | str = os.devnull,
        prelude: Path | str | None = None,
    ) -> Process:
        """Runs `armillary argv`.

        Args:
            env: beside or instead of the variables of this process.
            cwd: working folder of the command.
            output: file that takes standard output and standard error.
            prelude: Python file that the command's process runs first, e.g. to make a phase long.
        """
        request = {
            "argv": list(argv),
            "env": dict(os.environ) | _ONE_THREAD | dict(env or {}),
            "cwd": str(Path(cwd).absolute()),
            "output": str(Path(output).absolute()),
            "prelude": None if prelude is None else str(Path(prelude).absolute()),
        }
        with self._lock:
            self._channel.sendall(json.dumps(request).encode() + b"\n")
            self._read_until(lambda: bool(self._answers), timeout=60.0)
            pid = int(self._answers.pop(0)["started"])
        return Process(pid, self, Path(output))

    def start_ranks(
        self,
        argv: Sequence[str],
        nproc: int,
        env: Mapping[str, str] | None = None,
        *,
        cwd: Path | str = ".",
        output: Path | str = os.devnull,
        prelude: Path | str | None = None,
    ) -> list[Process]:
        """The ranks of one run, as `armillary train --nproc` starts them, without the launcher.

        Each rank's output goes to `output` with `.N` behind it.
        """
        port = str(free_port())
        ranks = []
        for rank in range(nproc):
            place = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(nproc),
                "LOCAL_WORLD_SIZE": str(nproc),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": "lo",
            }
            own = output if str(output) == os.devnull else f"{output}.{rank}"
            variables = dict(env or {}) | place
            ranks.append(self.start(argv, variables, cwd=cwd, output=own, prelude=prelude))
        return ranks

    def code(self, pid: int, timeout: float) -> int | None:
        """The exit code of a process, -N after signal N; None: it still runs."""
        with self._lock:
            self._read_until(lambda: pid in self._codes, timeout)
            return self._codes.get(pid)

    def _read_until(self, enough: Any, timeout: float) -> None:
        """Takes what the server says until `enough()`; under the lock."""
        deadline = time.monotonic() + timeout
        while not enough():
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._channel], [], [], left)[0]:
                return
            data = self._channel.recv(65536)
            if not data:
                raise RuntimeError(f"the zygote ended (exit code {self._server.wait()})")
            *lines, self._left = (self._left + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "ended" in message:
                    self._codes[message["ended"]] = message["code"]
                else:
                    self._answers.append(message)


@dataclass(frozen=True)
class Process:
    """A command that a zygote started."""

    pid: int
    _zygote: Zygote = field(repr=False)
    _output: Path

    def poll(self) -> int | None:
        """The exit code, -N after signal N; None while it runs."""
        return self._zygote.code(self.pid, 0.0)

    def wait(self, timeout: float = 120.0) -> int:
        """Waits for the end and returns the exit code, -N after signal N.

        Raises:
            TimeoutError: it still runs.
        """
        code = None
        deadline = time.monotonic() + timeout
        while code is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
            code = self._zygote.code(self.pid, 0.05)  # short: others ask by the same channel
        return code

    def send(self, number: int) -> None:
        """Sends it a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it and what it started, at once, and waits for that."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.wait(30.0)

    def output(self) -> str:
        """What it has printed so far."""
        return self._output.read_text(errors="replace") if self._output.is_file() else ""


def free_port() -> int:
    """A port of the loopback that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# The server ----------------------------------------------------------------------------------


def _serve(channel: socket.socket) -> dict[str, Any] | None:
    """Forks on request until the channel closes; returns the request in a child, else None."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    running: set[int] = set()
    left = b""
    _say(channel, {"ready": os.getpid()})
    while True:
        ready = select.select([channel, wake_read], [], [])[0]
        if wake_read in ready:
            os.read(wake_read, 4096)
            for pid, code in _ended():
                running.discard(pid)
                _say(channel, {"ended": pid, "code": code})
        if channel not in ready:
            continue
        data = channel.recv(1 << 20)
        if not data:
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            return None
        *lines, left = (left + data).split(b"\n")
        for line in lines:
            # As a launcher does: who is asked to stop before it listens hears of it when it does.
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            pid = os.fork()
            if pid:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            else:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (wake_read, wake_write):
                    os.close(descriptor)
                channel.close()
                request: dict[str, Any] = json.loads(line)
                return request
            running.add(pid)
            _say(channel, {"started": pid})


def _say(channel: socket.socket, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the next read tells
        channel.sendall(json.dumps(message).encode() + b"\n")


def _ended() -> list[tuple[int, int]]:
    """The children that ended, and how."""
    found = []
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found.append((ended[0], os.waitstatus_to_exitcode(ended[1])))
    return found


def _become(request: Mapping[str, Any]) -> int:
    """What the child does: the command, in the place that was asked for; returns its exit code."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = ["armillary", *request["argv"]]
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    from armillary.__main__ import main

    if request["prelude"] is not None:
        runpy.run_path(request["prelude"])
    return main()


if __name__ == "__main__":
    import importlib

    for _name in _IMPORTS:
        importlib.import_module(_name)
    assert threading.active_count() == 1, "a fork must find no thread but its own"
    _request = _serve(socket.socket(fileno=int(sys.argv[1])))
    # Through the interpreter's own end, as a command ends that was started from a shell.
    sys.exit(0 if _request is None else _become(_request))
