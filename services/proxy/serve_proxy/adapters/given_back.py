"""Gives the memory that bodies have needed back to the system.

Why it would stay otherwise: glibc takes buffers of up to 32 MiB from its heap once one as large was freed, and what is
allocated between them and lives on keeps all that lies below from going back. It was measured: after 300 uploads at
once the process kept all of their memory for good.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from serve_common.dispatch.request_body import UploadRoom

_log = structlog.get_logger(__name__)

LOOK_EVERY_S: Final = 5.0
GROWN_BYTES_MIN: Final = 16 * 1024 * 1024
"""By so much must the process have grown: giving back less is not worth the look at the whole heap."""
_TRIES_MAX: Final = 6
"""After so many looks what is still there counts as needed."""
_STATM: Final = Path("/proc/self/statm")


async def give_back_memory(room: UploadRoom) -> None:
    """Look every `LOOK_EVERY_S` whether the process has grown while few bodies are held; for ever.

    Ends at once where the C library offers no way.
    """
    trim = _find_trim()
    if trim is None:
        return
    least_bytes = resident_bytes()
    tries = 0
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        now_bytes = resident_bytes()
        least_bytes = min(least_bytes, now_bytes)
        if now_bytes - least_bytes < GROWN_BYTES_MIN:
            tries = 0
            continue
        if room.admitted_bytes > GROWN_BYTES_MIN:
            continue
        await asyncio.to_thread(trim, 0)
        kept_bytes = resident_bytes()
        _log.debug("memory_given_back", given_back_bytes=now_bytes - kept_bytes, kept_bytes=kept_bytes)
        # Connections of clients that were refused may still hold some of it: that goes with a later look.
        tries += 1
        if tries >= _TRIES_MAX:
            least_bytes, tries = kept_bytes, 0


def resident_bytes() -> int:
    """What this process has in memory."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _find_trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL("libc.so.6").malloc_trim
    except (OSError, AttributeError):
        return None
    return trim if _STATM.exists() else None
