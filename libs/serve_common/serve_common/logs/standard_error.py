"""Writes whole log lines to standard error, whatever becomes of it: nothing that befalls a log ends a process.

Why not Python's own stream: it raises in the code that logs, and it keeps what a full disk did not take, to begin the
next line with. Here a line that was cut off is ended first, and what could not be written is counted and told by a line
as soon as there is room.
"""

from __future__ import annotations

import errno
import os
import select
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Final, final

from serve_common.logs.lines import dropped_line
from serve_common.ports import Clock

DISK_FULL: Final = "disk_full"
NOT_WRITTEN: Final = "not_written"
TOO_MANY: Final = "too_many"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_WAIT_MS: Final = 1000
"""How long a stream that takes nothing is waited for, when it is one that does not block."""


@final
class DroppedLines:
    """How many lines of this process reached no log, by why. Any thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter({DISK_FULL: 0, NOT_WRITTEN: 0, TOO_MANY: 0})

    def count(self, reason: str, lines: int) -> None:
        """So many more."""
        with self._lock:
            self._counts[reason] += lines

    def by_reason(self) -> dict[str, int]:
        """So far; every reason is there."""
        with self._lock:
            return dict(self._counts)


dropped_lines: Final = DroppedLines()
"""Of this process."""


@final
class StandardError:
    """Takes whole lines from any thread; one that is not read makes the calling thread wait."""

    def __init__(self, ids: Mapping[str, str], clock: Clock, descriptor: int = 2) -> None:
        """``ids``: what the lines about dropped ones bear."""
        self._ids = ids
        self._clock = clock
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._is_torn = False
        """The last line that was written has no end."""
        self._untold = 0
        self._why = ""

    def write(self, lines: bytes) -> None:
        """Write ``lines``; what cannot be written is counted, and told by a line once there is room."""
        with self._lock:
            told = self._untold
            head = dropped_line(self._clock.now(), self._ids, told, self._why) if told else b""
            written, failure = self._put(head + lines)
            if written >= len(head):
                self._untold -= told
            if failure is not None:
                missing = lines[max(0, written - len(head)) :].count(b"\n")
                self._untold += missing
                self._why = failure.strerror or str(failure)
                dropped_lines.count(DISK_FULL if failure.errno in _FULL else NOT_WRITTEN, missing)

    def put(self, lines: bytes) -> None:
        """Write ``lines``. Raises OSError, for those who count by themselves; of the last line a part may be there."""
        with self._lock:
            _, failure = self._put(lines)
        if failure is not None:
            raise failure

    def _put(self, lines: bytes) -> tuple[int, OSError | None]:
        """How much of ``lines`` was written, and what kept the rest from it."""
        left = memoryview(lines)
        try:
            if self._is_torn:
                os.write(self._descriptor, b"\n")
                self._is_torn = False
            while left:
                left = left[self._write_some(left) :]
        except OSError as error:
            written = len(lines) - len(left)
            self._is_torn = self._is_torn or (written > 0 and lines[written - 1] != ord("\n"))
            return written, error
        return len(lines), None

    def _write_some(self, left: memoryview) -> int:
        while True:
            try:
                return os.write(self._descriptor, left)
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                if not poll.poll(_WAIT_MS):
                    raise
