"""How glibc gives memory back: large tensors come and go, and their pages stay."""

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
# What is larger is mapped and unmapped each time, every page of it faulted in anew; 32 MiB is the
# most that glibc takes, and a 4K BGR frame has 25 MB.
_MMAP_THRESHOLD_BYTES = 32 * _MIB
# So much may lie free at the end of a heap before it goes back to the kernel.
_TRIM_THRESHOLD_BYTES = 128 * _MIB
# A thread's heap has 64 MiB at most, and one that is empty is kept only for so much of padding.
# Padding is address space; pages of it that nobody touches cost nothing.
_TOP_PAD_BYTES = 64 * _MIB
# Each arena keeps what was freed in it, so few of them keep little. With 4 clients and 2.76 MB in
# and out, CPU per request was 0.75 of glibc's own choice, and memory 90 MB instead of 130; without
# this bound it was 170.
_ARENAS = 2


def keep_large_buffers() -> bool:
    """Let memory of large tensors be used again without the kernel; once, at the daemon's start.

    Returns:
        False where libc has no such choice (musl, macOS): all goes on, at more CPU per tensor.
    """
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
    """Give the kernel all pages that lie free; where libc cannot, they stay. It takes milliseconds,
    in which who allocates may wait."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return
    trim.argtypes, trim.restype = (ctypes.c_size_t,), ctypes.c_int
    trim(0)


def resident_bytes() -> int:
    """How much memory this process has now; 0 where the kernel does not tell."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
