"""The real clock: the only place that reads wall time."""

from __future__ import annotations

import time


class SystemClock:
    """Wall time at start, moved on by the monotonic clock, so that a step of the wall clock cannot end a lease."""

    def __init__(self) -> None:
        self._base = time.time() - time.monotonic()  # noqa: TID251 - this is the one place where time enters

    def now(self) -> float:
        """Seconds since 1970; never goes backwards."""
        return self._base + time.monotonic()
