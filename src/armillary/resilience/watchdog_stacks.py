"""Where the threads of this process are, and whether they wait for other ranks. Loads no torch."""

from __future__ import annotations

import contextlib
import gc
import linecache
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

OWN_THREADS = ("watchdog", "signs-of-life", "signals")
"""Beginnings of names of threads that only look on."""

_FRAMES_TOLD = 3
_IDLE = ("/threading.py", "/queue.py", "/selectors.py", "/concurrent/futures/")
"""Where a thread is that waits for another one of its own process, or for work."""
_DEBUGGERS = ("/bdb.py", "/pydevd")
_PASSED_THROUGH = ("torch/_ops.py", "torch/utils/_contextlib.py", "torch/_library/")
"""What stands between a call and the native code that it ends in."""
_OF_RANKS = "torch/distributed/"
_WRAPPERS = ("wrapper", "inner", "__call__")
_WAITS = re.compile(
    r"_c10d_functional|symm_mem|\.wait\(|\b(all_reduce|all_gather\w*|reduce_scatter\w*|all_to_all\w*"
    r"|broadcast\w*|barrier|i?send|i?recv|batch_isend_irecv|wait_tensor|monitored_barrier)\("
)
_BACKWARD = "_engine_run_backward"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a thread is."""

    frames: tuple[str, ...]
    """The innermost frames, innermost first, as `file:line function`."""
    waits_in: str
    """The collective in which it waits for other ranks; empty: none, as far as its stack tells."""
    opaque: bool
    """Whether it is in native code, a backward pass, that may wait for other ranks unseen."""


def place_of(thread: int) -> Place | None:
    """Where the work of a thread is: in it, or in the thread of this process that it waits for."""
    with _frames_now() as frames:
        if thread not in frames:
            return None
        worker = _worker_of(thread, frames)
        inner = list(_inner_first(frames[worker]))
    while len(inner) > 1 and _in(inner[0], _PASSED_THROUGH):
        inner.pop(0)
    told = _own(inner)[:_FRAMES_TOLD]
    return Place(
        frames=tuple(_words(frame) for frame in told),
        waits_in=_waits_in(inner),
        opaque=any(frame.f_code.co_name == _BACKWARD for frame in inner[:1]),
    )


def is_debugged(thread: int) -> bool:
    """Whether somebody has halted it, with a debugger of Python, to look around in it."""
    with _frames_now() as frames:
        return any(_in(each, _DEBUGGERS) for each in _inner_first(frames.get(thread)))


def threads_waited_for(thread: int) -> list[int]:
    """The other threads whose work a thread that waits inside its own process may wait for."""
    with _frames_now() as frames:
        if thread not in frames or not _is_idle(frames[thread]):
            return []
        for frame in _inner_first(frames[thread]):  # Thread.join says whom it waits for
            if frame.f_code.co_name != "join":
                continue
            joined = frame.f_locals.get("self")
            if isinstance(joined, threading.Thread):
                return [joined.ident] if joined.ident in frames else []
        names, main = _names(), threading.main_thread().ident  # which works for no other thread
        return [
            other
            for other, frame in sorted(frames.items(), key=lambda each: names.get(each[0], "~"))
            if other not in (thread, main)
            and not names.get(other, "").startswith(OWN_THREADS)
            and not _is_idle(frame)
        ]


def all_stacks() -> str:
    """The Python stacks of all threads, the innermost call last, and how the collector stands."""
    names = _names()
    main = threading.main_thread().ident
    parts = []
    with _frames_now() as frames:
        for thread in sorted(frames, key=lambda each: (each != main, names.get(each, "~"))):
            if names.get(thread, "").startswith(OWN_THREADS):
                continue
            lines = "".join(traceback.format_stack(frames[thread])).rstrip()
            name = names.get(thread, "made by native code")
            parts.append(f"thread {name} ({thread}):\n{lines}\n")
    counts = ", ".join(map(str, gc.get_count()))
    automatic = "on" if gc.isenabled() else "off"
    parts.append(f"garbage collection: automatic {automatic}, counts {counts}\n")
    return "\n".join(parts)


@contextlib.contextmanager
def _frames_now() -> Iterator[dict[int, FrameType]]:
    """The innermost frame of each thread, for as long as the context lasts.

    This very frame is among them. Were they not let go of, that would be a cycle, and all locals of
    all threads, tensors among them, would stay until the next collection of garbage.
    """
    frames = sys._current_frames()
    try:
        yield frames
    finally:
        frames.clear()


def native_frames(text: str) -> str:
    """The innermost frames of the main thread, the last one in what `faulthandler` wrote."""
    _, _, newest = text.rpartition("Timeout (")
    _, _, main = newest.rpartition("(most recent call first):")
    frames = re.findall(r'File "(.*?)", line (\d+) in (.*)', main)[:_FRAMES_TOLD]
    return " < ".join(f"{_short(file)}:{line} {name}" for file, line, name in frames)


def _worker_of(thread: int, frames: dict[int, FrameType]) -> int:
    """Follows a thread to the one that it waits for, as far as that is clear."""
    seen = {thread}
    while others := threads_waited_for(thread):
        if others[0] in seen or others[0] not in frames:
            break
        thread = others[0]
        seen.add(thread)
    return thread


def _waits_in(inner: list[FrameType]) -> str:
    """The collective in which a stack, innermost frame first, ends."""
    if not inner or _is_idle(inner[0]):
        return ""
    line = _line_of(inner[0])
    distributed = []
    for frame in inner:
        if not _in(frame, (_OF_RANKS, *_PASSED_THROUGH)):
            break
        if _in(frame, (_OF_RANKS,)) and frame.f_code.co_name not in _WRAPPERS:
            distributed.append(frame.f_code.co_name)
    if distributed:
        return distributed[-1]
    found = _WAITS.search(line)
    return line if found else ""


def _own(inner: list[FrameType]) -> list[FrameType]:
    """Frames worth telling: those of torch's and Python's own machinery at the inner end are not,
    as long as others are left."""
    hidden = (*_IDLE, *_PASSED_THROUGH, _OF_RANKS)
    rest = list(inner)
    while rest and _in(rest[0], hidden):
        rest.pop(0)
    return rest or inner


def _is_idle(frame: FrameType) -> bool:
    return _in(frame, _IDLE)


def _in(frame: FrameType, parts: tuple[str, ...]) -> bool:
    file = frame.f_code.co_filename
    return any(part in file for part in parts)


def _inner_first(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _line_of(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()


def _words(frame: FrameType) -> str:
    """`armillary/data/dataset.py:120 batch`."""
    return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"


def _short(file: str) -> str:
    """A path from its package on, else its name."""
    parts = Path(file).parts
    for root, skipped in (("armillary", 0), ("site-packages", 1)):
        if root in parts:
            last = len(parts) - 1 - parts[::-1].index(root)
            return "/".join(parts[last + skipped :])
    return Path(file).name


def _names() -> dict[int, str]:
    return {
        thread.ident: thread.name for thread in threading.enumerate() if thread.ident is not None
    }
