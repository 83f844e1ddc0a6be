"""Writes the access log, on a thread of its own.

Why a thread: a request must wait neither for a disk nor for whoever reads the log. Why not over the bus: a line for
each request would leave no room for others. What is too much is left out, counted, and the count is a line itself.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, final

from serve_common.ports import Clock
from serve_common.telemetry.log_lines import StandardError, dropped_line
from serve_proxy.core.access_line import LINE_BYTES_MAX, AccessLine, AccessLines

WAITING_LINES_MAX: Final = 10_000
"""Of some 500 bytes each."""
GATHER_S: Final = 0.05
"""After each round, so that lines are made and written many at once."""


@final
class AccessWriter:
    """Takes lines from one thread, the loop's, and writes them in pieces of whole lines, each at most `LINE_BYTES_MAX`.

    Its thread starts with the first line and sleeps while there are none.
    """

    def __init__(
        self, ids: dict[str, str], clock: Clock, write: Callable[[bytes], None] | None = None
    ) -> None:
        """``ids``: what all lines bear. ``write`` may take its time and raise OSError; None means standard error."""
        self._ids = ids
        self._clock = clock
        self._write = write or StandardError(ids, clock).put
        self._lines = AccessLines(ids)
        self._waiting: deque[tuple[float, AccessLine]] = deque()
        self._refused = 0
        """Lines that found no room, ever; written by the loop's thread only."""
        self._unwritten = 0
        """Lines that could not be written, ever; written by the own thread only, as is the next."""
        self._told = 0
        self._wake = threading.Event()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def add(self, line: AccessLine) -> None:
        """Take one line; never waits and never raises."""
        waiting = self._waiting
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
        """Write what waits, for at most so long; to be called when nothing is added any more."""
        self._is_closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._is_closing:
            self._wake.wait()
            self._wake.clear()
            self._carry()
            if not self._is_closing:
                time.sleep(GATHER_S)
        self._carry()

    def _carry(self) -> None:
        """One round: what waits now, and how many lines are missing."""
        piece: list[bytes] = []
        size = 0
        for _ in range(len(self._waiting)):
            at, line = self._waiting.popleft()
            encoded = self._lines.encode(line, at)
            if piece and size + len(encoded) > LINE_BYTES_MAX:
                self._put(piece, len(piece))
                piece, size = [], 0
            piece.append(encoded)
            size += len(encoded)
        if piece:
            self._put(piece, len(piece))
        missing = self._refused + self._unwritten - self._told
        if missing:
            why = "they came faster than they could be written"
            if self._put([dropped_line(self._clock.now(), {"log": "access", **self._ids}, missing, why)], 0):
                self._told += missing

    def _put(self, piece: list[bytes], requests: int) -> bool:
        try:
            self._write(b"".join(piece))
        except OSError:  # where logs are written is where it would be told
            self._unwritten += requests
            return False
        return True
