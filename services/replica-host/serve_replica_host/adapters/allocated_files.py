"""prometheus_client's file of numbers, which a full disk cannot turn into the end of a process.

Why: the library makes its files longer without asking for room, and writes to them as to memory. The kernel then finds
no block for a page and ends the process with SIGBUS. Here a file has all its blocks before anything is written; where
there is no room the numbers stay in memory, whole, and move into the file once there is.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path
from typing import Any, Final, final

from prometheus_client import values
from prometheus_client.mmap_dict import MmapedDict

_BYTES_MIN: Final = 16 * 1024
"""A fourth of the library's: now that it is really taken, and most processes need less."""
_AGAIN_S: Final = 1.0
"""How often a file is tried that found no room."""
_HEAD: Final = struct.Struct("i")
_HEAD_BYTES: Final = 8

_Library: Final[Any] = MmapedDict


@final
class AllocatedDict(_Library):  # type: ignore[misc]
    """In place of the library's `MmapedDict`, for writing. As there, the caller holds the lock."""

    def __init__(self, filename: str, read_mode: bool = False) -> None:  # noqa: FBT001, FBT002 - the library's
        assert not read_mode, "files are read without mapping them"
        self._fname = filename
        self._positions: dict[str, int] = {}
        self._used = _HEAD_BYTES
        self._f: Any = None
        """None while the numbers are in memory."""
        self._again_at = 0.0
        self._m: Any = None
        path = Path(filename)
        size = path.stat().st_size if path.exists() else 0
        if size:
            self._f = path.open("a+b")
            self._capacity = size
            self._m = mmap.mmap(self._f.fileno(), size)
            self._used = max(_HEAD.unpack_from(self._m, 0)[0], _HEAD_BYTES)
            for key, _value, _timestamp, position in self._read_all_values():
                self._positions[key] = position
        else:
            self._capacity = _BYTES_MIN
            self._m = mmap.mmap(-1, _BYTES_MIN)
            self._note_used()
            self._move_to_file()

    def _note_used(self) -> None:
        self._m[: _HEAD.size] = _HEAD.pack(self._used)

    def _init_value(self, key: str) -> None:
        encoded = key.encode()
        padded = encoded + b" " * (8 - (len(encoded) + 4) % 8)
        value = struct.pack(f"i{len(padded)}sdd", len(encoded), padded, 0.0, 0.0)
        capacity = self._capacity
        while self._used + len(value) > capacity:
            capacity *= 2
        if capacity > self._capacity:
            self._grow(capacity)
        self._m[self._used : self._used + len(value)] = value
        self._used += len(value)
        self._note_used()
        self._positions[key] = self._used - 16

    def write_value(self, key: str, value: float, timestamp: float) -> None:
        if self._f is None and time.monotonic() >= self._again_at:
            self._move_to_file()
        super().write_value(key, value, timestamp)

    def _grow(self, capacity: int) -> None:
        """Be so long, in the file or, where it finds no room, in memory. What the file had stays in it meanwhile."""
        if self._f is not None:
            try:
                os.posix_fallocate(self._f.fileno(), 0, capacity)
            except OSError:
                pass
            else:
                self._m = mmap.mmap(self._f.fileno(), capacity)
                self._capacity = capacity
                return
            self._f.close()
            self._f = None
        longer = mmap.mmap(-1, capacity)
        longer[: self._used] = self._m[: self._used]
        self._m, self._capacity = longer, capacity
        self._move_to_file()

    def _move_to_file(self) -> None:
        """Under another name first: a file with no head would spoil the page of whoever reads it."""
        path = Path(self._fname)
        fresh = path.with_suffix(".new")
        self._again_at = time.monotonic() + _AGAIN_S
        file = None
        try:
            file = fresh.open("w+b")
            os.posix_fallocate(file.fileno(), 0, self._capacity)
            mapped = mmap.mmap(file.fileno(), self._capacity)
            mapped[: self._used] = self._m[: self._used]
            fresh.replace(path)
        except OSError:
            if file is not None:
                file.close()
                fresh.unlink(missing_ok=True)
            return
        self._m, self._f = mapped, file

    def close(self) -> None:
        if self._m is not None:
            self._m.close()
            self._m = None
        if self._f is not None:
            self._f.close()
            self._f = None


def use_allocated_files() -> None:
    """For all of prometheus_client's values in this process, also those that user code makes."""
    values.MmapedDict = AllocatedDict  # type: ignore[attr-defined]
