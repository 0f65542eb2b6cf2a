"""The C library's allocator, told to keep big buffers instead of returning them to the system."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1  # malloc.h of glibc
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLDS = (1 << 30, 32 << 20)
"""Bytes, best first: older glibc refuse more than 32 MiB (DEFAULT_MMAP_THRESHOLD_MAX)."""
_NEVER = 2**31 - 1


def tune_host_allocator() -> bool:
    """Makes freed host tensors reusable without new page faults. Returns whether it took effect.

    By default glibc serves allocations of more than 32 MiB by `mmap` and unmaps them when freed,
    so each step touches fresh, zeroed pages: a copy of 67 MB takes 17.7 ms instead of 3.5 ms
    (measured on 2 cores of an AMD EPYC (Zen 4), torch 2.13). After this call such buffers come
    from the heap (where glibc is old, those up to 32 MiB) and the heap is not trimmed. The cost:
    the process keeps the memory of its peak until it ends. Elsewhere nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    mallopt.restype = ctypes.c_int
    from_heap = any(mallopt(_M_MMAP_THRESHOLD, size) for size in _MMAP_THRESHOLDS)
    untrimmed = bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))
    return from_heap and untrimmed
