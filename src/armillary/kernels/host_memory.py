"""The C library's allocator, told to keep big buffers instead of returning them to the system."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1  # malloc.h of glibc
_M_MMAP_THRESHOLD = -3
_LARGEST = 2**31 - 1


def tune_host_allocator() -> bool:
    """Makes freed host tensors reusable without new page faults. Returns whether it took effect.

    By default glibc serves allocations of more than 32 MiB by `mmap` and unmaps them when freed,
    so each step touches fresh, zeroed pages: a copy of 67 MB takes 17.7 ms instead of 3.5 ms.
    After this call such buffers come from the heap and the heap is not trimmed. The cost: the
    process keeps the memory of its peak until it ends. Elsewhere nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    mallopt.restype = ctypes.c_int
    return bool(mallopt(_M_MMAP_THRESHOLD, 1 << 30)) and bool(mallopt(_M_TRIM_THRESHOLD, _LARGEST))
