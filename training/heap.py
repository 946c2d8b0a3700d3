"""What the C library's heap (glibc) does with freed memory.

A training step frees gigabytes that the next one needs again. By default the heap gives large pieces back to the
system at once, and to have them zeroed anew takes a tenth of a step. If all of it is kept, however, the heap comes to
hold many freed pieces that the next batch's tensors do not fit: a training of 500 steps grew to three times the memory
it used. So it is kept, and returned once in a while.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_LARGEST_INT = 2**31 - 1


def keep_freed_memory() -> None:
    """Let the heap keep what is freed from now on, where the C library can (glibc)."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_MAX, 0)
        set_option(_M_TRIM_THRESHOLD, _LARGEST_INT)


def return_freed_memory() -> None:
    """Return freed pages of the heap to the system where the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
