"""The C library's heap: what it keeps of freed memory, and how it is told to give that back."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from typing import Final

RETAINED_BYTES_MAX: Final = 16 * 1024 * 1024
"""Freed bytes at the end of a heap (each thread has one) that it keeps; glibc's default begins with 128 KiB."""
HEAP_BYTES_MAX: Final = 8 * 1024 * 1024
"""Larger blocks are mapped, and given back when they are freed; glibc's default begins with 128 KiB, and rises up to
32 MiB with what is freed."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_TUNED_BY: Final = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Let the heap keep what bodies of some MiB need again and again; False where it is tuned by ``environment``
    already, or the C library is none that can be told.

    Why: each page that was given back is taken anew, zeroed and mapped by the kernel. Measured with echoes of 1 MiB,
    that was 40 % of a replica's CPU.
    """
    if any(name in environment for name in _TUNED_BY):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    is_set: bool = mallopt(_M_MMAP_THRESHOLD, HEAP_BYTES_MAX) and mallopt(
        _M_TRIM_THRESHOLD, RETAINED_BYTES_MAX
    )
    return bool(is_set)


def find_trim() -> Callable[[int], int] | None:
    """``malloc_trim``, which gives free memory back to the system; None where the C library has none."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL("libc.so.6").malloc_trim
    except (OSError, AttributeError):
        return None
    return trim
