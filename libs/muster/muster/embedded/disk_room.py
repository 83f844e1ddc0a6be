"""Whether a disk is full, in words: for whoever tells why something failed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

FULL_BELOW_BYTES: Final = 1024 * 1024
"""With less room than this a disk counts as full: a log line may still fit, a database's file does not."""


def disk_is_full(path: Path) -> str | None:
    """In words, when the disk of ``path`` has no room; None when it has, or when that cannot be known."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    free = found.f_bavail * found.f_frsize
    if free >= FULL_BELOW_BYTES and (found.f_favail or not found.f_files):
        return None
    what = f"{free // 1024} KiB free" if free < FULL_BELOW_BYTES else "no inode free"
    return f"the disk of {path} is full ({what}); make room there"
