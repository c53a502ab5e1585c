"""Configure glibc to keep freed memory, so that large tensors reuse their pages."""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

# mallopt(3); the numbers are glibc's, from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

_MIB = 1024 * 1024
# glibc maps and unmaps a larger block each time, and every page faults in anew; 32 MiB is glibc's
# maximum, and a 4K BGR frame has 25 MB.
_MMAP_THRESHOLD_BYTES = 32 * _MIB
# The free memory at the end of a heap that glibc keeps from the kernel.
_TRIM_THRESHOLD_BYTES = 128 * _MIB
# A thread's heap has 64 MiB at most, and glibc keeps an empty heap only within this padding.
# Padding is address space; untouched pages cost nothing.
_TOP_PAD_BYTES = 64 * _MIB
# Each arena keeps its freed memory, so few arenas keep little. With 4 clients and 2.76 MB in and
# out, CPU per request was 0.75 of that with glibc's defaults, and memory 90 MB instead of 130;
# without this bound memory was 170 MB.
_ARENAS = 2


def keep_large_buffers() -> bool:
    """Make freed memory of large tensors reusable without the kernel; False where libc has no such
    setting (musl, macOS), and a tensor costs more CPU."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        log.debug("allocator: libc has no mallopt, large tensors cost page faults")
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    chosen = {
        _M_MMAP_THRESHOLD: _MMAP_THRESHOLD_BYTES,
        _M_TRIM_THRESHOLD: _TRIM_THRESHOLD_BYTES,
        _M_TOP_PAD: _TOP_PAD_BYTES,
        _M_ARENA_MAX: _ARENAS,
    }
    return all(mallopt(option, value) == 1 for option, value in chosen.items())


def give_back() -> None:
    """Return all free pages to the kernel; without effect where libc cannot. The call takes
    milliseconds, during which allocations on other threads may wait."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return
    trim.argtypes, trim.restype = (ctypes.c_size_t,), ctypes.c_int
    trim(0)


def resident_bytes() -> int:
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
