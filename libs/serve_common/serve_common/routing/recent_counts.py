"""How much some counters grew within the last seconds, without a record of single events.

Why samples of running totals: the path of a request then only counts upwards, and needs no clock.
"""

from __future__ import annotations

from collections import deque
from typing import Final, final

_SAMPLES: Final = 10
"""A window moves on in steps of this part of it."""


@final
class RecentCounts:
    """Two running totals as they were at some moments within the last ``window_s``."""

    __slots__ = ("_next_at", "_samples", "_seen", "_step_s", "_window_s")

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._step_s = window_s / _SAMPLES
        self._samples: deque[tuple[float, int, int]] = deque()
        self._seen = (0, 0)
        self._next_at = float("-inf")

    def look(self, now: float, first: int, second: int) -> None:
        """Take note of the totals. To be called often: what they grew by since the last look counts as of now."""
        if now >= self._next_at:
            samples = self._samples
            samples.append((now, *self._seen))
            self._next_at = now + self._step_s
            gone_at = now - self._window_s
            while samples[0][0] < gone_at:
                samples.popleft()
        self._seen = (first, second)

    def forget(self, first: int, second: int) -> None:
        """Count from these totals on."""
        self._samples.clear()
        self._seen = (first, second)
        self._next_at = float("-inf")

    def grown(self, now: float, first: int, second: int) -> tuple[int, int]:
        """By how much each total grew within the window that ends now."""
        self.look(now, first, second)
        _, first_then, second_then = self._samples[0]
        return first - first_then, second - second_then
