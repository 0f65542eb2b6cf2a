"""A pool of processes that start quickly and can be killed at any time.

Each is a fresh interpreter that imports neither torch nor the caller's `__main__`, takes calls of
importable functions from its standard input, and ends when that closes: also when this process is
killed. The functions write files atomically, so that nothing half done remains.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, TypeVar, cast

from armillary.foundation.errors import ArmillaryError, Problem, RunError

T = TypeVar("T")
Call = tuple[Callable[..., Any], tuple[Any, ...]]


class WorkerPool:
    """Runs calls in `size` processes; with one, in this process.

    Use it as a context. Processes start at the first `run` of more than one call, and are reused.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            if kind is not None:
                process.kill()
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(OSError):  # a dead worker takes no more calls
                process.stdin.close()
            process.wait()
            process.stdout.close()
        self._processes.clear()

    def run(
        self, function: Callable[..., T], calls: Sequence[tuple[Any, ...]]
    ) -> Iterable[tuple[int, T]]:
        """Calls `function` with each tuple of arguments; yields (index, result) as they come.

        Raises:
            RunError: a process died.
            Exception: the first exception that a call raised.
        """
        if self.size <= 1 or len(calls) <= 1:
            for index, arguments in enumerate(calls):
                yield index, function(*arguments)
            return
        while len(self._processes) < min(self.size, len(calls)):
            self._processes.append(_start())
        yield from self._run_in_processes(function, calls)

    def _run_in_processes(
        self, function: Callable[..., T], calls: Sequence[tuple[Any, ...]]
    ) -> Iterable[tuple[int, T]]:
        waiting: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        for index in range(len(calls)):
            waiting.put(index)
        for _ in self._processes:
            waiting.put(None)
        done: queue.SimpleQueue[tuple[int, bool, Any]] = queue.SimpleQueue()

        def feed(process: subprocess.Popen[bytes]) -> None:
            while (index := waiting.get()) is not None:
                try:
                    succeeded, value = _call(process, (function, calls[index]))
                except BaseException as error:
                    succeeded, value = False, error
                done.put((index, succeeded, value))
                if not succeeded:
                    return

        for process in self._processes:
            threading.Thread(target=feed, args=(process,), daemon=True).start()
        for _ in calls:
            index, succeeded, value = done.get()
            if not succeeded:
                raise value.error() if isinstance(value, _Failure) else value
            yield index, cast(T, value)


class _Failure:
    """An exception on its way from a worker."""

    def __init__(self, error: Exception) -> None:
        self._kind = type(error)
        self._arguments = error.args
        if isinstance(error, ArmillaryError):
            self._arguments = (error.problems,)
        elif isinstance(error, OSError):
            self._arguments = (error.errno, error.strerror, error.filename)
        self._trace = traceback.format_exc()

    def error(self) -> Exception:
        """The exception again."""
        error = self._kind(*self._arguments)
        error.add_note("in a data worker:\n" + self._trace)
        return error


def runs_in_workers(thing: object) -> bool:
    """Whether a fresh interpreter can import the class of an object."""
    module = type(thing).__module__
    package = module.partition(".")[0]
    if package == __name__.partition(".")[0]:
        return True
    found = PathFinder.find_spec(package)
    loaded = getattr(sys.modules.get(package), "__file__", None)
    return found is not None and found.origin is not None and found.origin == loaded


def _start() -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    environment |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "armillary.data.worker_main"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,  # Ctrl-C reaches this process, which then ends its workers
    )


def _call(process: subprocess.Popen[bytes], call: Call) -> tuple[bool, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        pickle.dump(pickle.dumps(call), process.stdin)  # bytes can be read whatever they hold
        process.stdin.flush()
        found: tuple[bool, Any] = pickle.load(process.stdout)
    except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
        code = process.wait()
        raise RunError(
            Problem(
                f"a data worker died (exit code {code}; -9 is a kill, often for lack of memory)",
                fix="run the command again, it goes on from there; fewer --data.workers need less "
                "memory",
            )
        ) from error
    return found


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """What a worker does: answers calls until there are no more."""
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        try:
            function, arguments = pickle.loads(request)
            answer = pickle.dumps((True, function(*arguments)))
        except Exception as error:  # also that of a call or an answer that cannot travel
            answer = pickle.dumps((False, _Failure(error)))
        try:
            answers.write(answer)
            answers.flush()
        except BrokenPipeError:
            return
