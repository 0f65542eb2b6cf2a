"""Runs a function on real ranks: one process each, gloo between them, one thread per rank.

    def total(offset: int) -> int: ...           # at module level of a test file

    assert run_ranks(total, 2, offset=1) == [3, 3]

A server process imports torch once per test session and forks the ranks, so that a call costs a
fraction of a second and not one import of torch per rank.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_TESTS = str(Path(__file__).parent)
_PRELOAD = [
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel",
]
_GRACE_SECONDS = 1.0


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120, **kwargs: Any
) -> list[Any]:
    """Calls `function(*args, **kwargs)` on each of `world_size` ranks of one process group.

    Arguments and results travel by pickle. The ranks see RANK, LOCAL_RANK and WORLD_SIZE, and a
    gloo group that is there already. Returns the results in order of rank.

    Raises:
        AssertionError: a rank raised, died or took longer than `timeout` seconds. The rank that
            failed first comes first, with its traceback and what it printed.
    """
    context = _context()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        # Sent as bytes: a pickled function would be looked up before the paths are known.
        task = pickle.dumps((args, kwargs))
        target = (_file_of(function), function.__module__, function.__qualname__)
        connections: list[Connection] = []
        processes = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_rank_main,
                    args=(theirs, _Rank(rank, world_size, folder, timeout), target, task),
                    name=f"rank-{rank}",
                )
                with _one_thread_each():
                    process.start()
                theirs.close()
                connections.append(ours)
                processes.append(process)
            outcomes = _collect(connections, timeout)
        finally:
            for connection in connections:
                connection.close()
            _end(processes)
        exit_codes = [process.exitcode for process in processes]
        _raise_failures(outcomes, exit_codes, Path(folder), timeout)
        return [pickle.loads(outcomes[rank][2]) for rank in range(world_size)]


def _context() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)  # has an effect only before the server starts
    return context


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """OpenMP reads its settings when torch is loaded, so they must be there before the fork."""
    wanted = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _file_of(function: Callable[..., Any]) -> str:
    file = sys.modules[function.__module__].__file__
    if file is None or "<locals>" in function.__qualname__:
        raise TypeError(f"{function.__qualname__} must stand at module level of a file")
    return file


Outcome = tuple[bool, float, bytes]
"""Whether the rank succeeded, when it ended, and its pickled result or its traceback."""


def _collect(connections: list[Connection], timeout: float) -> dict[int, Outcome]:
    """What each rank sent. Ends early, after a short grace, once a rank failed or died."""
    deadline = time.monotonic() + timeout
    pending = dict(enumerate(connections))
    outcomes: dict[int, Outcome] = {}
    while pending and (left := deadline - time.monotonic()) > 0:
        ready = wait(list(pending.values()), left)
        for rank in [rank for rank, connection in pending.items() if connection in ready]:
            failed = True
            with contextlib.suppress(EOFError, OSError):
                outcomes[rank] = pickle.loads(pending[rank].recv_bytes())
                failed = not outcomes[rank][0]
            del pending[rank]
            if failed:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    return outcomes


def _end(processes: list[Any]) -> None:
    """Waits shortly for ranks that are on their way out, then kills what is left."""
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _raise_failures(
    outcomes: dict[int, Outcome], exit_codes: list[int | None], folder: Path, timeout: float
) -> None:
    failed = sorted(
        (when, rank, text.decode()) for rank, (ok, when, text) in outcomes.items() if not ok
    )
    silent = [rank for rank in range(len(exit_codes)) if rank not in outcomes]
    if not failed and not silent:
        return
    parts = [f"rank {rank} failed:\n{text}{_printed(folder, rank)}" for _, rank, text in failed]
    parts += [
        f"rank {rank} sent no result (exit code {exit_codes[rank]}, limit {timeout} s)"
        f"{_printed(folder, rank)}"
        for rank in silent
    ]
    raise AssertionError("\n".join(parts))


def _printed(folder: Path, rank: int) -> str:
    log = folder / f"rank-{rank}.log"
    text = log.read_text(errors="replace").strip() if log.exists() else ""
    return f"\n--- printed by rank {rank} (end) ---\n{text[-4000:]}" if text else ""


@dataclass(frozen=True)
class _Rank:
    rank: int
    world_size: int
    folder: str
    timeout: float


def _rank_main(
    connection: Connection, place: _Rank, target: tuple[str, str, str], task: bytes
) -> None:
    with Path(place.folder, f"rank-{place.rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    # A rank ends by itself even if the test process is killed and can no longer end it.
    faulthandler.dump_traceback_later(place.timeout + 1, exit=True, file=sys.__stderr__)
    os.environ.update(
        RANK=str(place.rank), LOCAL_RANK=str(place.rank), WORLD_SIZE=str(place.world_size)
    )
    try:
        outcome = (True, time.monotonic(), _call(place, target, task))
    except BaseException:
        outcome = (False, time.monotonic(), traceback.format_exc().encode())
    with contextlib.suppress(EOFError, OSError):
        connection.send_bytes(pickle.dumps(outcome))
        connection.recv_bytes()  # until every rank is done: no peer loses its connection early
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _call(place: _Rank, target: tuple[str, str, str], task: bytes) -> bytes:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(Path(place.folder, "store")), place.world_size),
        rank=place.rank,
        world_size=place.world_size,
        timeout=datetime.timedelta(seconds=place.timeout),
    )
    file, module, qualname = target
    for path in (_TESTS, str(Path(file).parent)):
        if path not in sys.path:
            sys.path.insert(0, path)
    function: Any = importlib.import_module(module)
    for name in qualname.split("."):
        function = getattr(function, name)
    args, kwargs = pickle.loads(task)
    return pickle.dumps(function(*args, **kwargs))
