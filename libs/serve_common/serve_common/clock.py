"""Time: the clock that services read, how often a thing may be done, and the waits between attempts.

Why an object: tests and the simulation choose the time. What is no loop takes it as ``now``.
"""

from __future__ import annotations

import time
from typing import Protocol, final


class Clock(Protocol):
    """Where time is read, so that simulation can move it."""

    def now(self) -> float:
        """Seconds since 1970; never goes backwards within a process."""
        ...


class SystemClock:
    """Wall time at start, moved on by the monotonic clock, so that a step of the wall clock cannot end a lease.

    It is the only place that reads wall time.
    """

    def __init__(self) -> None:
        self._base = time.time() - time.monotonic()  # noqa: TID251 - this is the one place where time enters

    def now(self) -> float:
        """Seconds since 1970; never goes backwards."""
        return self._base + time.monotonic()


@final
class TokenBucket:
    """Holds up to ``burst`` tokens, starts full, and is filled at ``rate_per_s``.

    Why a bucket and not a window: a caller that has been quiet may use a burst at once, and none can use twice as much
    around the end of a window.
    """

    __slots__ = ("_burst", "_counted_at", "_rate_per_s", "_tokens")

    def __init__(self, rate_per_s: float, burst: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._tokens = burst
        self._counted_at = float("-inf")

    def take(self, now: float) -> bool:
        """Take a token; False when there is none. ``now`` is in seconds, of any clock."""
        self._fill(now)
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def wait_s(self, now: float) -> float:
        """Seconds until there is a token; 0 when there is one."""
        self._fill(now)
        return max(0.0, (1 - self._tokens) / self._rate_per_s)

    def _fill(self, now: float) -> None:
        if now > self._counted_at:
            self._tokens = min(self._burst, self._tokens + (now - self._counted_at) * self._rate_per_s)
        self._counted_at = now


def backoff_s(failures: int, min_s: float, max_s: float) -> float:
    """Seconds to wait after so many failures in a row: none after none, then ``min_s``, doubling up to ``max_s``.

    Why bounded: what fails again and again must neither use up the machine nor be given up.
    """
    return 0.0 if failures <= 0 else min(max_s, min_s * 2.0 ** min(failures - 1, 30))
