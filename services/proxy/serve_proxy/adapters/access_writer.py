"""Writes the access log, on a thread of its own.

Why a thread: a request must wait neither for a disk nor for a slow log reader. Why not over the bus: a line for each
request would leave no capacity for other messages. Lines beyond the limit are dropped and counted; the count is logged.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, final

from serve_common.clock import Clock
from serve_common.telemetry.log_lines import StandardError, dropped_line
from serve_proxy.core.access_line import LINE_BYTES_MAX, AccessLine, AccessLines

WAITING_LINES_MAX: Final = 10_000
"""Lines queued for writing, some 500 bytes each; more are dropped."""
GATHER_S: Final = 0.05
"""Seconds between two rounds of writing, so that lines are encoded and written in batches."""


@final
class AccessWriter:
    """Takes lines from one thread, the loop's, and writes them in pieces of whole lines, each at most `LINE_BYTES_MAX`.

    Its thread starts with the first line and sleeps while there are none.
    """

    def __init__(
        self, ids: dict[str, str], clock: Clock, write: Callable[[bytes], None] | None = None
    ) -> None:
        """``ids`` are fields of every line. ``write`` may block and raise OSError; None writes to standard error."""
        self._ids = ids
        self._clock = clock
        self._write = write or StandardError(ids, clock).put
        self._lines = AccessLines(ids)
        self._queue: deque[tuple[float, AccessLine]] = deque()
        self._refused = 0
        """Lines dropped because the queue was full, in all; written by the loop's thread only."""
        self._unwritten = 0
        """Lines that could not be written, in all; like the next one, written by the writer thread only."""
        self._reported = 0
        self._wake = threading.Event()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def add(self, line: AccessLine) -> None:
        """Take one line; never waits and never raises."""
        waiting = self._queue
        if len(waiting) >= WAITING_LINES_MAX:
            self._refused += 1
            return
        waiting.append((self._clock.now(), line))
        if not self._wake.is_set():
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="access_log", daemon=True)
                self._thread.start()
            self._wake.set()

    def close(self, timeout_s: float) -> None:
        """Write the queued lines, for at most ``timeout_s`` seconds; call it once no more lines are added."""
        self._is_closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._is_closing:
            self._wake.wait()
            self._wake.clear()
            self._write_queued()
            if not self._is_closing:
                time.sleep(GATHER_S)
        self._write_queued()

    def _write_queued(self) -> None:
        """Write the lines that are queued now, and a line with the number of dropped ones."""
        chunk: list[bytes] = []
        size = 0
        for _ in range(len(self._queue)):
            at, line = self._queue.popleft()
            encoded = self._lines.encode(line, at)
            if chunk and size + len(encoded) > LINE_BYTES_MAX:
                self._put(chunk, len(chunk))
                chunk, size = [], 0
            chunk.append(encoded)
            size += len(encoded)
        if chunk:
            self._put(chunk, len(chunk))
        missing = self._refused + self._unwritten - self._reported
        if missing:
            why = "they came faster than they could be written"
            if self._put([dropped_line(self._clock.now(), {"log": "access", **self._ids}, missing, why)], 0):
                self._reported += missing

    def _put(self, chunk: list[bytes], requests: int) -> bool:
        try:
            self._write(b"".join(chunk))
        except OSError:  # the failure would be logged to the same place
            self._unwritten += requests
            return False
        return True
